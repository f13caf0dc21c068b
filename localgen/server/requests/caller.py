"""The caller of a request, and its requests to the engine."""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request as HttpRequest
from starlette.types import Scope

from localgen.backends.errors import InvalidRequest
from localgen.backends.kv_store.address import parse_address
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import (
    EmbedRequest,
    PromptChunks,
    Request,
    TokenizeRequest,
    split_hashes,
)

# client host of connections over the Unix socket
LOCAL_CLIENT = "local"
# set by the gateway of a cluster: its secret, without which the others are not obeyed; the address
# of an engine that has computed the beginning of the prompt; and, whatever its value, the wish that
# nothing but the prompt is computed
GATEWAY_HEADER = "x-localgen-gateway"
KV_PEER_HEADER, PROMPT_ONLY_HEADER = "x-localgen-kv-peer", "x-localgen-prompt-only"
# milliseconds since the request came to the gateway
AGE_HEADER = "x-localgen-age-ms"
# the account at the gateway, which counts its tokens
ACCOUNT_HEADER = "x-localgen-account"
# the chunks of the prompt, of which it is to be reported which are held: see encode_chunks
CHUNKS_HEADER = "x-localgen-chunks"
# prefix of accounts that are API keys
KEY_ACCOUNT_PREFIX = "key-"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    request_id: of the HTTP request. client: unit of fair queueing. account: unit of rate limits.
    arrived_s: monotonic seconds. is_local: connected over the Unix socket.
    stabilize, kv_peer, prompt_only, chunks: as in Request.
    """

    request_id: str
    client: str
    account: str
    arrived_s: float
    is_local: bool
    stabilize: bool = False
    kv_peer: str = ""
    prompt_only: bool = False
    chunks: PromptChunks | None = None

    @classmethod
    def from_request(cls, http: HttpRequest, user: str | None = None) -> Caller:
        """user: the `user` field of the request, if any, which becomes the client.

        Raises InvalidRequest if the gateway has named a peer that has no address, or no chunks.
        """
        scope = http.scope
        is_local = is_local_request(scope)
        from_gateway = http.headers if scope["is_gateway"] else {}
        account: str = scope["account"]
        client = user or _client_name(http, account)
        kv_peer = from_gateway.get(KV_PEER_HEADER, "")
        if kv_peer:
            parse_address(kv_peer, "kv_peer")
        return cls(
            scope["request_id"],
            client,
            account,
            scope["arrived_s"],
            is_local,
            scope["stabilize"],
            kv_peer,
            PROMPT_ONLY_HEADER in from_gateway,
            decode_chunks(from_gateway.get(CHUNKS_HEADER, "")),
        )

    @property
    def key_account(self) -> str | None:
        """The account of an API key, whose requests alone it may end. None without a key."""
        return self.account if self.account.startswith(KEY_ACCOUNT_PREFIX) else None

    def new_request(self, params: SamplingParams, **fields: Any) -> Request:
        """The request of this caller. fields: other fields of Request."""
        if self.prompt_only:
            params = replace(params, max_tokens=0)
            fields["prompt_only"] = True
        return Request(
            id=self.request_id,
            client=self.client,
            account=self.account,
            arrived_s=self.arrived_s,
            params=params,
            stabilize=self.stabilize,
            kv_peer=self.kv_peer,
            chunks=self.chunks,
            **fields,
        )

    def new_tokenize_request(self, *, add_special: bool = True, **fields: Any) -> TokenizeRequest:
        """A request for the tokens of a prompt. fields: as in new_request."""
        return TokenizeRequest(self.new_request(SamplingParams(), **fields), add_special)

    def new_embed_request(
        self, inputs: tuple[str | tuple[int, ...], ...], query: str | None = None
    ) -> EmbedRequest:
        return EmbedRequest(
            id=self.request_id,
            client=self.client,
            arrived_s=self.arrived_s,
            inputs=inputs,
            query=query,
        )


def encode_chunks(chunks: PromptChunks) -> str:
    """The chunks of a prompt for CHUNKS_HEADER: their number, and the hashes in base64."""
    return f"{chunks.count}:{base64.b64encode(b''.join(chunks.hashes)).decode()}"


def decode_chunks(text: str) -> PromptChunks | None:
    """What encode_chunks has written; None if that is empty. Raises InvalidRequest."""
    if not text:
        return None
    count, _, hashes = text.partition(":")
    try:
        found = split_hashes(base64.b64decode(hashes, validate=True))
        return PromptChunks(found, int(count)) if found else None
    except ValueError as error:
        raise InvalidRequest(f"{CHUNKS_HEADER}: {error}") from error


def _client_name(http: HttpRequest, account: str) -> str:
    """The API key account, else the X-Localgen-Session header, else the connection."""
    if account.startswith(KEY_ACCOUNT_PREFIX):
        return account
    session = http.headers.get("x-localgen-session")
    if session:
        return session
    return f"{http.client.host}:{http.client.port}" if http.client else ""


def is_local_request(scope: Scope) -> bool:
    """Return True if the request came over the Unix socket."""
    return scope["client"] is not None and scope["client"][0] == LOCAL_CLIENT
