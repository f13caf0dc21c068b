"""The gateway: checks each request as a server does, and passes it to the replica of its prefix."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import httpx
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localgen.backends.errors import LocalgenError, NotFound, ServerUnavailable
from localgen.backends.types import PromptChunks
from localgen.cluster.exchange import ENDED, HOP_HEADERS, Exchange, PullExchange
from localgen.cluster.posted import PULL_PATH, Posted, is_unload, unload_answer
from localgen.cluster.prefix_table import prompt_chunks
from localgen.cluster.route import Asked, Choice
from localgen.cluster.totals import merged_loads, merged_metrics, merged_stats
from localgen.server.http.errors import error_response
from localgen.server.http.guard import PUBLIC_PATHS, RequestRefused
from localgen.server.requests.caller import (
    ACCOUNT_HEADER,
    AGE_HEADER,
    CHUNKS_HEADER,
    GATEWAY_HEADER,
    KV_PEER_HEADER,
    PROMPT_ONLY_HEADER,
    encode_chunks,
)
from localgen.server.requests.protocol import encode_json
from localgen.server.stats import loads
from localgen.server.stats.metrics import CONTENT_TYPE

# requests whose replica is remembered: to cancel one, or to continue an answer that it stores
_MAX_REQUESTS = 10_000
_MAX_TRIES = 3
_CONNECT_TIMEOUT_S = 2.0
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
# whose prompts another replica may compute
_GENERATING_PATHS = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
        *("/chat/completions", "/completions", "/completion", "/infill"),
        *("/api/chat", "/api/generate"),
    )
)
# without a prompt replica for this time, the one that answers computes the prompt
_PROMPT_CHOICE_S = 1.0
# fewer new chunks are computed by the replica that answers: about 512 tokens
MIN_PROMPT_CHUNKS = 8
# a header has at most 64 KiB; the replica reports of so many whether it holds them
_MAX_SENT_CHUNKS = 3072
_NO_PATH = "paths have no . and .. here: send the path as it is"
# answered by the gateway: a probe must start no replica where there is none
_ALIVE = encode_json({"status": "ok"})
_log = logging.getLogger("localgen.cluster")
_OWN_ID = re.compile(r"/v1/(?:requests|responses)/(?:resp_)?([0-9a-zA-Z]+)")


# the second argument: replicas that do not answer
Choose = Callable[[Asked, frozenset[str]], AbstractAsyncContextManager[Choice]]
# a path; the name and the body of each replica's answer
AskAll = Callable[[str], Awaitable[Sequence[tuple[str, bytes]]]]
# a path and a JSON body; each replica's answer
PostAll = Callable[[str, bytes], Awaitable[Sequence[Posted]]]


class Gateway:
    """An ASGI application that forwards to replicas; access is checked before it.

    choose_for_prompt: of the replicas that compute prompts for the others; None without any.
    post_all: of downloads and unloads; None if replicas are not localgen's servers.
    default_names: of the model that all replicas have. secret: tells replicas that a request comes
    from here; None if they are not localgen's servers. replica_key: the only key that those take.
    """

    def __init__(
        self,
        choose: Choose,
        ask_all: AskAll,
        choose_for_prompt: Choose | None = None,
        post_all: PostAll | None = None,
        *,
        default_names: Collection[str] = ("",),
        secret: str | None = None,
        replica_key: str | None = None,
    ) -> None:
        self._choose, self._ask_all = choose, ask_all
        self._choose_for_prompt, self._post_all = choose_for_prompt, post_all
        self._default_names = default_names
        self._secret = secret
        self._replica_key = replica_key
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout)
        self._replica_by_request: OrderedDict[str, Choice] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, scope["arrived_s"] = scope["path"], time.monotonic()
        if not {".", ".."}.isdisjoint(path.split("/")):  # clients of HTTP resolve them
            await error_response(path, NotFound.code, _NO_PATH)(scope, receive, send)
            return
        if path in PUBLIC_PATHS:
            await Response(_ALIVE, media_type="application/json")(scope, receive, send)
            return
        if path in ("/v1/stats", "/metrics"):
            await self._total(path, await self._ask_all(path))(scope, receive, send)
            return
        if path == loads.PATH:
            await (await self._loads_response(scope))(scope, receive, send)
            return
        try:
            body = await _read_body(receive)
        except RequestRefused as refused:
            await refused.to_response(path)(scope, receive, send)
            return
        # parsed before anything is awaited: a large body has its turn only until then
        incoming = self._parse(scope, body)
        answering = asyncio.create_task(self._answer(incoming, receive, send))
        leaving = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # the replica notices that its connection is closed, and stops
            leaving.cancel()
            if not answering.done():
                answering.cancel()
        if not answering.cancelled():
            with suppress(asyncio.CancelledError):
                await answering

    def _parse(self, scope: Scope, body: bytes) -> _Incoming:
        fields = _json_object(body)
        model = self._model_name(fields)
        chunks = prompt_chunks({**fields, "model": model})
        owner = self._owner(scope["path"], fields)
        # what is not reported is not routed by either
        asked = Asked(chunks[:_MAX_SENT_CHUNKS], model, owner.replica if owner else None)
        return _Incoming(scope, body, fields, chunks, asked, owner)

    async def _answer(self, incoming: _Incoming, receive: Receive, send: Send) -> None:
        scope, path = incoming.scope, incoming.path
        post_all = self._post_all if scope["method"] == "POST" else None
        if post_all is not None and is_unload(path, incoming.fields):
            answer = unload_answer(await post_all(path, incoming.body))
            if answer is not None:
                response = Response(answer.body, answer.status, media_type="application/json")
                await response(scope, receive, send)
                return
        async with AsyncExitStack() as stack:
            exchange = Exchange(path, send)
            if post_all is not None and path == PULL_PATH:
                quietly = encode_json({**incoming.fields, "stream": False})
                elsewhere = asyncio.ensure_future(post_all(path, quietly))
                stack.callback(elsewhere.cancel)  # if the client leaves
                exchange = PullExchange(path, send, elsewhere)
            try:
                await self._try_replicas(incoming, exchange)
            except LocalgenError as error:
                await error_response(path, error.code, error.message)(scope, receive, send)

    async def _try_replicas(self, incoming: _Incoming, exchange: Exchange) -> None:
        """Raises ServerUnavailable without a replica that answers, and the exchange's errors."""
        gone: set[str] = set()
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                async with self._choose(incoming.asked, frozenset(gone)) as chosen:
                    choice = incoming.owner_or(chosen, gone)
                    gone.add(choice.replica)
                    kv_peer = await self._prompt_address(choice, incoming)
                    await self._forward(
                        choice, incoming, kv_peer, exchange, can_retry=tries_left > 0
                    )
                return
            except httpx.HTTPError as error:
                if exchange.has_started:
                    await exchange.fail(error)
                    return
                if not tries_left:
                    raise ServerUnavailable(ENDED) from error

    async def _prompt_address(self, choice: Choice, incoming: _Incoming) -> str:
        """Where the chosen replica should fetch the beginning of the prompt, or empty.

        If much of it is new, another replica computes it first. If that fails, the chosen one does.
        """
        if self._choose_for_prompt is None or not _has_long_prompt(choice, incoming):
            return choice.kv_peer
        asked = replace(incoming.asked, wanted=None)
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(_PROMPT_CHOICE_S):
                    choosing = self._choose_for_prompt(asked, frozenset())
                    prompt = await stack.enter_async_context(choosing)
                knows_more = choice.new_chunks < prompt.new_chunks
                kv_peer = choice.kv_address if knows_more else prompt.kv_peer
                reply = await self._client.send(self._request(incoming, prompt.url, kv_peer, True))
                reply.raise_for_status()
        except (ServerUnavailable, httpx.HTTPError, TimeoutError) as error:
            reason = str(error) or "there is no prompt replica"
            _log.warning("a prompt is computed by the replica that answers: %s", reason)
            return choice.kv_peer
        return prompt.kv_address

    async def _forward(
        self,
        choice: Choice,
        incoming: _Incoming,
        kv_peer: str,
        exchange: Exchange,
        *,
        can_retry: bool,
    ) -> None:
        """Raises httpx.HTTPError; with can_retry, also if the replica is ending."""
        request = self._request(incoming, choice.url, kv_peer)
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE and can_retry:
                raise httpx.HTTPStatusError(ENDED, request=request, response=response)
            if request_id := response.headers.get("x-request-id"):
                self._remember(request_id, choice)
            await exchange.start(choice.replica, response)
            async for piece in response.aiter_raw():
                await exchange.write(piece)
            await exchange.end()
        finally:
            await response.aclose()

    def _total(self, path: str, answers: Sequence[tuple[str, bytes]]) -> Response:
        if path == "/metrics":
            return Response(merged_metrics(answers), headers={"Content-Type": CONTENT_TYPE})
        return Response(encode_json(merged_stats(answers)), media_type="application/json")

    async def _loads_response(self, scope: Scope) -> Response:
        try:
            sections = loads.read_sections(QueryParams(scope["query_string"]).get("include"))
            total = merged_loads(await self._ask_all(loads.PATH))
        except LocalgenError as error:
            return error_response(scope["path"], error.code, error.message, error.param)
        return Response(
            encode_json(loads.loads_body(total, sections)), media_type="application/json"
        )

    def _request(
        self, incoming: _Incoming, url: str, kv_peer: str, prompt_only: bool = False
    ) -> httpx.Request:
        """The request to a replica's server."""
        scope = incoming.scope
        # quoted anew: the replica must read the path that was compared here
        raw_path = quote(scope["path"]).encode()
        if scope["query_string"]:
            raw_path += b"?" + scope["query_string"]
        target = httpx.URL(url).copy_with(raw_path=raw_path)
        dropped = _OWN_HEADERS if self._replica_key is None else _OWN_HEADERS | _KEY_HEADERS
        headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
        if self._replica_key is not None:
            headers.append((b"authorization", f"Bearer {self._replica_key}".encode()))
        if scope["client"] and not any(name == b"x-localgen-session" for name, _ in headers):
            host, port = scope["client"]
            headers.append((b"x-localgen-session", f"{host}:{port}".encode()))
        if self._secret is not None:
            headers += _gateway_headers(self._secret, incoming, kv_peer, prompt_only)
        return self._client.build_request(
            scope["method"], target, headers=headers, content=incoming.body
        )

    def _model_name(self, fields: Mapping[str, Any]) -> str:
        """The name of the model, empty for the one that all replicas have."""
        name = fields.get("model")
        # Ollama's clients add it
        name = name.removesuffix(":latest") if isinstance(name, str) else ""
        return "" if name in self._default_names else name

    def _owner(self, path: str, fields: Mapping[str, Any]) -> Choice | None:
        """The replica that answered what the request is about, or None."""
        named = _OWN_ID.match(path)
        request_id = named[1] if named else fields.get("previous_response_id")
        if not isinstance(request_id, str):
            return None
        return self._replica_by_request.get(request_id.removeprefix("resp_"))

    def _remember(self, request_id: str, choice: Choice) -> None:
        self._replica_by_request[request_id] = Choice(choice.replica, choice.url)
        while len(self._replica_by_request) > _MAX_REQUESTS:
            self._replica_by_request.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A request of a client. chunks: of its prompt. owner: the replica that it is about, if any."""

    scope: Scope
    body: bytes
    fields: Mapping[str, Any]
    chunks: tuple[bytes, ...]
    asked: Asked
    owner: Choice | None = None

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    def owner_or(self, choice: Choice, gone: Collection[str]) -> Choice:
        """The owner, unless it does not answer: one that leaves is chosen no more, but lives on."""
        if self.owner is None or self.owner.replica in {choice.replica, *gone}:
            return choice
        return self.owner


def _has_long_prompt(choice: Choice, incoming: _Incoming) -> bool:
    """True if another replica could compute much of the prompt.

    They have the model that all have, and earlier answers are in one replica.
    """
    return (
        incoming.path in _GENERATING_PATHS
        and choice.new_chunks >= MIN_PROMPT_CHUNKS
        and not incoming.asked.model
        and incoming.fields.get("previous_response_id") is None
    )


def _gateway_headers(
    secret: str, incoming: _Incoming, kv_peer: str, prompt_only: bool
) -> list[tuple[bytes, bytes]]:
    """What only the gateway may say to a replica."""
    chunks = PromptChunks(incoming.chunks[:_MAX_SENT_CHUNKS], len(incoming.chunks))
    said = {
        GATEWAY_HEADER: secret,
        ACCOUNT_HEADER: incoming.scope.get("account", ""),
        AGE_HEADER: str(round((time.monotonic() - incoming.scope["arrived_s"]) * 1e3)),
        CHUNKS_HEADER: encode_chunks(chunks) if incoming.chunks else "",
        KV_PEER_HEADER: kv_peer,
        PROMPT_ONLY_HEADER: "1" if prompt_only else "",
    }
    return [(name.encode(), value.encode()) for name, value in said.items() if value]


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return b"".join(parts)


def _json_object(body: bytes) -> dict[str, Any]:
    """The body, or nothing if it is no JSON object: then the replica refuses it."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
