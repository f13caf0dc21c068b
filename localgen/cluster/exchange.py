"""The response to a client, of which a replica sends the parts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
from starlette.types import Send

from localgen.backends.errors import ServerUnavailable
from localgen.cluster.posted import NotEverywhere, Posted, require_everywhere
from localgen.server.anthropic import serializer as anthropic
from localgen.server.http.errors import error_response
from localgen.server.ollama import serializer as ollama
from localgen.server.openai import serializer as openai
from localgen.server.requests.protocol import Framing, encode_json

ENDED = "the engine that answered has ended: try again"
# of one hop only; the body is passed as it is, so its length stays
HOP_HEADERS = frozenset(
    {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"}
)
RESPONSES_PATH = "/v1/responses"
# after which a client is told what its download or load waits for
_QUIET_S = 1.0
_PULLING = {"status": "waiting for the other machines"}
_LOADING = {"progress": 1.0, "waiting": "the other replicas load it", "silent_s": None}


class AnswerCut(Exception):
    """An answer that has begun cannot be completed: its connection has to be closed."""


class Exchange:
    """The response to one request, begun once and ended once.

    has_started: the client has its status, so that no other replica can answer.
    """

    def __init__(self, path: str, send: Send) -> None:
        self._path, self._send = path, send
        self._media_type = ""
        self.has_started = self._is_ending = False

    async def start(self, replica: str, response: httpx.Response) -> None:
        self._media_type = response.headers.get("content-type", "")
        headers = [
            (name.lower(), value)
            for name, value in response.headers.raw
            if name.lower() not in HOP_HEADERS and name.lower() != b"date"  # the gateway's own
        ]
        headers.append((b"x-localgen-replica", replica.encode()))
        self.has_started = True
        await self._send(
            {"type": "http.response.start", "status": response.status_code, "headers": headers}
        )

    async def write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        self._is_ending = True
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, message: str) -> None:
        """End a stream with an error event, unless it is ending. Raises AnswerCut for any other
        answer."""
        if self._is_ending:
            return
        self._is_ending = True
        body = bytes(error_response(self._path, ServerUnavailable.code, message).body)
        if self._media_type.startswith("text/event-stream"):
            is_named = self._path.startswith((anthropic.PATH, RESPONSES_PATH))
            if self._path.startswith(RESPONSES_PATH):
                failure = {"type": "error", "code": ServerUnavailable.code, "message": message}
                body = encode_json(failure | {"param": None})
            await self.write((b"event: error\n" if is_named else b"") + b"data: " + body + b"\n\n")
        elif self._path.startswith(ollama.API_PREFIX):
            await self.write(body + b"\n")
        else:
            raise AnswerCut(message)
        await self.end()


class CommonExchange(Exchange):
    """The response to a download or a load. Its last event waits for the other replicas.

    elsewhere: what all replicas have answered.
    """

    def __init__(self, path: str, send: Send, elsewhere: asyncio.Future[Sequence[Posted]]) -> None:
        super().__init__(path, send)
        self._elsewhere = elsewhere
        self._framing: Framing | None = None  # of a stream
        self._held = b""

    async def start(self, replica: str, response: httpx.Response) -> None:
        """Raises NotEverywhere if it is no stream, and another replica has failed."""
        media_type = response.headers.get("content-type", "")
        for framing in (ollama.NDJSON, openai.SSE):
            if response.is_success and media_type.startswith(framing.content_type):
                self._framing = framing
        if self._framing is None:
            require_everywhere(await self._elsewhere)
        await super().start(replica, response)

    async def write(self, piece: bytes) -> None:
        if self._framing is None:
            await super().write(piece)
            return
        # the last event is that before the terminator
        end, num_held = (b"\n\n", 2) if self._framing.terminator else (b"\n", 1)
        *events, rest = (self._held + piece).split(end)
        sent, held = events[:-num_held], [*events[-num_held:], rest]
        self._held = end.join(held)
        if sent:
            await super().write(end.join([*sent, b""]))

    async def end(self) -> None:
        if self._framing is not None:
            if not (await asyncio.wait({self._elsewhere}, timeout=_QUIET_S))[0]:
                waiting = _LOADING if self._framing.terminator else _PULLING
                await super().write(self._framing.encode_event(waiting))
            try:
                require_everywhere(await self._elsewhere)
            except NotEverywhere as error:
                self._held = self._framing.encode_error(error.code, str(error))
            await super().write(self._held)
        await super().end()

    async def fail(self, message: str) -> None:
        self._framing = None  # it waits for no replica
        await super().fail(message)
