"""Streaming responses, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localgen.backends.errors import LocalgenError
from localgen.server.models.disk_paths import error_message
from localgen.server.models.engine_watch import silence_s
from localgen.server.models.request_stream import EngineSilent
from localgen.server.models.resident import ResidentModel
from localgen.server.requests.caller import is_local_request
from localgen.server.requests.protocol import Framing, ResponseSerializer, encode_json

_log = logging.getLogger("localgen.server")


async def send_stream_headers(send: Send, framing: Framing) -> None:
    headers = [
        (b"content-type", framing.content_type.encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_json_response(send: Send, value: object, status: int = 200) -> None:
    """Send a complete JSON response."""
    body = encode_json(value)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects; the caller then sees a normal exit."""
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
            await asyncio.sleep(0)  # let a pending cancellation arrive inside this block
    except asyncio.CancelledError:
        if not gone or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()


class LoadNotices:
    """Begins a stream while its model loads: with bytes that clients ignore, for those that give up
    a stream without any, and with notices while the engine is silent."""

    def __init__(self, send: Send, serializer: ResponseSerializer) -> None:
        self._send, self._serializer = send, serializer
        self._has_begun = False
        self._told_s = 0.0
        self._telling: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def keep_alive(self, interval_s: float) -> None:
        """Send something at this interval from now on, until `stop`."""

        def tell() -> None:
            self._tell(self._serializer.keep_alive)
            self._timer = loop.call_later(interval_s, tell)

        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(interval_s, tell)

    def update(self, resident: ResidentModel) -> None:
        """Tell the client each time that the silence has doubled. Call this during the load."""
        silent_s = silence_s(resident)
        if silent_s is None or silent_s < 2 * self._told_s:
            return
        if self._tell(lambda: self._serializer.notice(EngineSilent(silent_s))):
            self._told_s = silent_s

    def _tell(self, encode: Callable[[], bytes]) -> bool:
        """Begin to send something; False if the client has not taken the last one yet."""
        if self._telling is not None and not self._telling.done():
            return False
        self._telling = asyncio.create_task(self._send_notice(encode()))
        return True

    async def _send_notice(self, notice: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send_stream_headers(self._send, self._serializer.framing)
        await self._send({"type": "http.response.body", "body": notice, "more_body": True})

    async def stop(self) -> bool:
        """Send nothing more; return True if the stream has begun. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
        if self._telling is not None:
            await self._telling
        return self._has_begun


class EventStreamResponse(Response):
    """Streams events. The first is awaited before the headers, so that it may raise."""

    def __init__(self, events: AsyncGenerator[object, None], framing: Framing) -> None:
        super().__init__()
        self._events = events
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        framing = self._framing
        async with cancel_on_disconnect(receive), contextlib.aclosing(self._events) as events:
            first = await anext(events)
            await send_stream_headers(send, framing)
            await self._send_event(send, first)
            try:
                async for event in events:
                    await self._send_event(send, event)
                end = framing.terminator
            except LocalgenError as error:
                code, param = error.code, error.param
                is_local = is_local_request(scope)
                message = error_message(code, error.message, param, is_local=is_local)
                end = framing.encode_error(code, message, param)
            except Exception:
                _log.exception("event stream failed")
                end = framing.encode_error("internal_error", "internal error: see the server log")
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_event(self, send: Send, event: object) -> None:
        body = self._framing.encode_event(event)
        await send({"type": "http.response.body", "body": body, "more_body": True})


class LastEventResponse(Response):
    """Consumes events and sends only the last one."""

    def __init__(self, events: AsyncGenerator[object, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(receive), contextlib.aclosing(self._events) as events:
            last = None
            async for event in events:
                last = event
            await send_json_response(send, last)
