"""The gateway: checks each request as a server does, and passes it to the replica of its prefix."""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localgen.backends.errors import LocalgenError, ServerUnavailable
from localgen.cluster.prefix_table import prompt_chunks
from localgen.cluster.totals import merged_loads, merged_metrics, merged_stats
from localgen.server.anthropic import serializer as anthropic
from localgen.server.http.errors import error_response
from localgen.server.ollama import serializer as ollama
from localgen.server.requests.protocol import encode_json
from localgen.server.stats import loads
from localgen.server.stats.metrics import CONTENT_TYPE

# requests whose replica is remembered: to cancel one, or to continue an answer that it stores
_MAX_REQUESTS = 10_000
_MAX_TRIES = 3
_CONNECT_TIMEOUT_S = 2.0
# of one hop only; the body is passed as it is, so its length stays
_HOP_HEADERS = frozenset(
    {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"}
)
_ENDED = "the engine that answered has ended: try again"
_OWN_ID = re.compile(r"/v1/(?:requests|responses)/(?:resp_)?([0-9a-zA-Z]+)")


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, for the time of a request. url: of its server."""

    replica: str
    url: str


# chunks of the prompt, the replica that must answer, or None, and those that do not
Choose = Callable[
    [Sequence[bytes], str | None, frozenset[str]], AbstractAsyncContextManager[Choice]
]
# a path; the name and the body of each replica's answer
AskAll = Callable[[str], Awaitable[Sequence[tuple[str, bytes]]]]


class Gateway:
    """An ASGI application that forwards to replicas; access is checked before it."""

    def __init__(self, choose: Choose, ask_all: AskAll) -> None:
        self._choose, self._ask_all = choose, ask_all
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout)
        self._replica_by_request: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in ("/v1/stats", "/metrics"):
            await (await self._total_response(path))(scope, receive, send)
            return
        if path == loads.PATH:
            await (await self._loads_response(scope))(scope, receive, send)
            return
        body = await _read_body(receive)
        answering = asyncio.create_task(self._answer(scope, body, receive, send))
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

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        path, fields = scope["path"], _json_object(body)
        chunks, wanted = prompt_chunks(fields), self._owner(path, fields)
        exchange = _Exchange(path, send, self._remember)
        gone: set[str] = set()
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                async with self._choose(chunks, wanted, frozenset(gone)) as choice:
                    gone.add(choice.replica)
                    await self._forward(choice, scope, body, exchange)
                return
            except ServerUnavailable as error:
                await error_response(path, error.code, error.message)(scope, receive, send)
                return
            except httpx.HTTPError as error:
                if exchange.has_started:
                    await exchange.fail(error)
                    return
                if not tries_left:
                    await error_response(path, ServerUnavailable.code, _ENDED)(scope, receive, send)
                    return

    async def _forward(
        self, choice: Choice, scope: Scope, body: bytes, exchange: _Exchange
    ) -> None:
        url = httpx.URL(choice.url).copy_with(
            path=scope["path"], query=scope["query_string"] or None
        )
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_HEADERS]
        if scope["client"] and not any(name == b"x-localgen-session" for name, _ in headers):
            host, port = scope["client"]
            headers.append((b"x-localgen-session", f"{host}:{port}".encode()))
        request = self._client.build_request(scope["method"], url, headers=headers, content=body)
        response = await self._client.send(request, stream=True)
        try:
            await exchange.start(choice.replica, response)
            async for piece in response.aiter_raw():
                await exchange.write(piece)
            await exchange.end()
        finally:
            await response.aclose()

    async def _total_response(self, path: str) -> Response:
        try:
            return self._total(path, await self._ask_all(path))
        except ServerUnavailable as error:
            return error_response(path, error.code, error.message)

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

    def _owner(self, path: str, fields: Mapping[str, Any]) -> str | None:
        """The replica that answered what the request is about, or None."""
        named = _OWN_ID.match(path)
        request_id = named[1] if named else fields.get("previous_response_id")
        if not isinstance(request_id, str):
            return None
        return self._replica_by_request.get(request_id.removeprefix("resp_"))

    def _remember(self, request_id: str, replica: str) -> None:
        self._replica_by_request[request_id] = replica
        while len(self._replica_by_request) > _MAX_REQUESTS:
            self._replica_by_request.popitem(last=False)


class _Exchange:
    """The response to one request, begun once and ended once."""

    def __init__(self, path: str, send: Send, remember: Callable[[str, str], None]) -> None:
        self._path, self._send, self._remember = path, send, remember
        self._media_type = ""
        self.has_started = False

    async def start(self, replica: str, response: httpx.Response) -> None:
        if request_id := response.headers.get("x-request-id"):
            self._remember(request_id, replica)
        self._media_type = response.headers.get("content-type", "")
        headers = [
            (name.lower(), value)
            for name, value in response.headers.raw
            if name.lower() not in _HOP_HEADERS
        ]
        headers.append((b"x-localgen-replica", replica.encode()))
        self.has_started = True
        await self._send(
            {"type": "http.response.start", "status": response.status_code, "headers": headers}
        )

    async def write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: httpx.HTTPError) -> None:
        """End a stream whose replica has ended with an error event; cut off any other answer."""
        body = bytes(error_response(self._path, ServerUnavailable.code, _ENDED).body)
        if self._media_type.startswith("text/event-stream"):
            event = b"event: error\n" if self._path.startswith(anthropic.PATH) else b""
            await self.write(event + b"data: " + body + b"\n\n")
        elif self._path.startswith(ollama.API_PREFIX):
            await self.write(body + b"\n")
        else:
            raise error
        await self.end()


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
