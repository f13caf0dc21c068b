"""A request of a client, and how it is passed to a replica."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.types import Scope

from localgen.backends.types import PromptChunks
from localgen.cluster.exchange import HOP_HEADERS
from localgen.cluster.route import Asked, Choice
from localgen.server.ollama.serializer import API_PREFIX
from localgen.server.requests.caller import (
    ACCOUNT_HEADER,
    AGE_HEADER,
    CHUNKS_HEADER,
    GATEWAY_HEADER,
    KV_PEER_HEADER,
    PROMPT_ONLY_HEADER,
    encode_chunks,
)

# a header has at most 64 KiB; the replica reports of so many whether it holds them
MAX_SENT_CHUNKS = 3072
# the gateway has checked the origin, and replicas know of none
_OWN_HEADERS = HOP_HEADERS | {b"origin"}
_OWN_HEADERS |= {
    name.encode()
    for name in (
        *(GATEWAY_HEADER, ACCOUNT_HEADER, AGE_HEADER),
        *(KV_PEER_HEADER, PROMPT_ONLY_HEADER, CHUNKS_HEADER),
    )
}
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request of a client. fields: of its body, or None if it is no JSON object.

    chunks: of its prompt. owner: the replica that it is about, if any.
    """

    scope: Scope
    body: bytes
    fields: Mapping[str, Any] | None
    chunks: tuple[bytes, ...]
    asked: Asked
    owner: Choice | None = None

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def is_parsed(self) -> bool:
        """True if a replica reads the body: as JSON by its type, or in Ollama's API by any."""
        if self.path.startswith(API_PREFIX):
            return True
        media_type: bytes = dict(self.scope["headers"]).get(b"content-type", b"")
        kind, _, form = media_type.partition(b";")[0].strip().lower().partition(b"/")
        return kind == b"application" and form.rpartition(b"+")[2] == b"json"

    @property
    def raw_path(self) -> bytes:
        """The path and query, quoted anew: the replica must read the path that was compared."""
        raw_path = quote(self.path).encode()
        query: bytes = self.scope["query_string"]
        return raw_path + b"?" + query if query else raw_path

    def headers(self, *, keeps_keys: bool) -> list[tuple[bytes, bytes]]:
        """The client's headers for a replica, with its session. keeps_keys: API keys as well."""
        dropped = _OWN_HEADERS if keeps_keys else _OWN_HEADERS | _KEY_HEADERS
        headers = [(name, value) for name, value in self.scope["headers"] if name not in dropped]
        if self.scope["client"] and not any(name == b"x-localgen-session" for name, _ in headers):
            host, port = self.scope["client"]
            headers.append((b"x-localgen-session", f"{host}:{port}".encode()))
        return headers

    def owner_or(self, choice: Choice, gone: Collection[str]) -> Choice:
        """The owner, unless it does not answer: one that leaves is chosen no more, but lives on."""
        if self.owner is None or self.owner.replica in {choice.replica, *gone}:
            return choice
        return self.owner


def gateway_headers(
    secret: str, incoming: Incoming, kv_peer: str, prompt_only: bool
) -> list[tuple[bytes, bytes]]:
    """What only the gateway may say to a replica."""
    chunks = PromptChunks(incoming.chunks[:MAX_SENT_CHUNKS], len(incoming.chunks))
    said = {
        GATEWAY_HEADER: secret,
        ACCOUNT_HEADER: incoming.scope.get("account", ""),
        AGE_HEADER: str(round((time.monotonic() - incoming.scope["arrived_s"]) * 1e3)),
        CHUNKS_HEADER: encode_chunks(chunks) if incoming.chunks else "",
        KV_PEER_HEADER: kv_peer,
        PROMPT_ONLY_HEADER: "1" if prompt_only else "",
    }
    return [(name.encode(), value.encode()) for name, value in said.items() if value]


def json_object(body: bytes) -> dict[str, Any] | None:
    """The body, or None if it is no JSON object: then the replica refuses it."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
