"""One request for text: model, engine, answer, and an end to it when the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from localgen.backends.errors import LocalgenError, TimedOut, error_of
from localgen.backends.types import Delta, Failed, Finished, Request
from localgen.server import openai
from localgen.server.engines import Event, Stream
from localgen.server.journal import Entry, Journal
from localgen.server.manager import ModelManager
from localgen.server.openai import Format

_log = logging.getLogger("localgen.server")
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was asked. format_of: from a request's id and a model's name to its format.

    account: who pays for its tokens. timeout_s: how long it may take in all. paths: whether the
    model may be named by its path.
    """

    model: str | None
    account: str
    timeout_s: float | None
    request: Request
    stream: bool
    include_usage: bool
    format_of: Callable[[str, str], Format]
    paths: bool = False


class GenerationResponse(Response):
    """Answers a job. What fails before the first token is raised, as an HTTP status."""

    def __init__(self, manager: ModelManager, journal: Journal, job: Job) -> None:
        super().__init__()
        self._manager = manager
        self._journal = journal
        self._job = job
        self._entry = Entry(
            id=job.request.id,
            asked=job.model or "",
            client=job.request.client,
            account=job.account,
            arrived_s=job.request.arrived_s,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            using = self._manager.using(self._job.model, paths=self._job.paths)
            async with cancelled_on_disconnect(receive), using as (resident, _):
                self._entry.model = resident.file.name
                stream = resident.engine.submit(self._job.request)
                late = self._end_in_time(stream)
                try:
                    answer = self._job.format_of(self._job.request.id, resident.file.name)
                    await self._answer(stream, answer, self._named(send))
                finally:
                    stream.cancel()
                    if late is not None:
                        late.cancel()
        except LocalgenError as error:
            self._entry.outcome = error.code
            raise
        finally:
            self._journal.close(self._entry)

    def _end_in_time(self, stream: Stream) -> asyncio.TimerHandle | None:
        """See that the request ends in an error when its time is over."""
        limit_s = self._job.timeout_s
        if limit_s is None:
            return None
        message = f"the request took longer than the {limit_s:g} s that it may take here"
        left_s = limit_s - (time.monotonic() - self._job.request.arrived_s)
        return asyncio.get_running_loop().call_later(left_s, stream.fail, TimedOut.code, message)

    def _named(self, send: Send) -> Send:
        """The same with the request's id among the headers."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (b"x-request-id", self._entry.id.encode())
                message = {**message, "headers": [*message["headers"], name]}
            await send(message)

        return named

    async def _take(self, stream: Stream) -> list[Event]:
        events = await stream.take()
        self._entry.see(events)
        return events

    async def _answer(self, stream: Stream, answer: Format, send: Send) -> None:
        events = await self._take(stream)
        if isinstance(events[0], Failed):
            raise error_of(events[0].code, events[0].message, events[0].param)
        if self._job.stream:
            await self._send_stream(events, stream, answer, send)
        else:
            await self._send_whole(events, stream, answer, send)

    async def _send_stream(
        self, events: list[Event], stream: Stream, answer: Format, send: Send
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        opening = answer.opening()
        while True:
            # events that piled up while the socket was busy leave in one write
            body = b"".join([*opening, *(self._encode(event, answer) for event in events)])
            ended = not isinstance(events[-1], Delta)
            await send({"type": "http.response.body", "body": body, "more_body": not ended})
            if ended:
                return
            opening = []
            events = await self._take(stream)

    def _encode(self, event: Event, answer: Format) -> bytes:
        match event:
            case Delta():
                return answer.delta(event)
            case Finished():
                return b"".join(answer.closing(event, include_usage=self._job.include_usage))
            case Failed(_, code, message, param):
                return openai.sse(openai.error_body(code, message, param))

    async def _send_whole(
        self, events: list[Event], stream: Stream, answer: Format, send: Send
    ) -> None:
        while isinstance(events[-1], Delta):
            events += await self._take(stream)
        end = events[-1]
        if isinstance(end, Failed):
            raise error_of(end.code, end.message, end.param)
        assert isinstance(end, Finished)
        deltas = [event for event in events if isinstance(event, Delta)]
        await send_json(send, answer.whole(deltas, end))


async def send_json(send: Send, value: object, status: int = 200) -> None:
    """A whole JSON response."""
    body = openai.encode(value)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client goes away; to its caller it then just ends."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
        if gone:
            await asyncio.sleep(0)  # a cancel that is on its way must land here
    except asyncio.CancelledError:
        if not gone or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()


class EventStream(Response):
    """Events of our own making. The first is awaited before the headers: it may be an error."""

    def __init__(self, events: AsyncGenerator[object, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancelled_on_disconnect(receive), contextlib.aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            await _send_event(send, first)
            try:
                async for event in events:
                    await _send_event(send, event)
                end = openai.DONE
            except LocalgenError as error:
                end = openai.sse(openai.error_of(error))
            except Exception:
                _log.exception("a stream of events failed")
                end = openai.sse(openai.error_body("internal_error", "the server's log says why"))
            await send({"type": "http.response.body", "body": end, "more_body": False})


async def _send_event(send: Send, event: object) -> None:
    await send({"type": "http.response.body", "body": openai.sse(event), "more_body": True})
