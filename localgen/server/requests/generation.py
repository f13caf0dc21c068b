"""Generation requests, independent of the API protocol."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localgen.backends.errors import LocalgenError, TimedOut, error_from_code
from localgen.backends.model_info import LoadOptions
from localgen.backends.types import Delta, Failed, Finished, Request
from localgen.server.models.disk_paths import error_message
from localgen.server.models.manager import ModelManager
from localgen.server.models.names import answered_name
from localgen.server.models.request_stream import EngineNotice, RequestEvent, RequestStream
from localgen.server.models.resident import KeepAlive
from localgen.server.requests.choices import FinishedChoice, merge_finished
from localgen.server.requests.presets import NamedSettings
from localgen.server.requests.protocol import Framing, ResponseMetadata, ResponseSerializer
from localgen.server.requests.streaming import (
    LoadNotices,
    cancel_on_disconnect,
    send_json_response,
    send_stream_headers,
)
from localgen.server.stats.request_log import GONE, RequestLog, RequestRecord

# a stream without any bytes for longer than this gets some, also while its model loads
KEEP_ALIVE_S = 15.0
# how long a request whose client has disconnected waits for its figures
_CANCEL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A generation request with its model.

    account: charged for its tokens. timeout_s: maximum duration since arrival. requests: one engine
    request per choice, n per prompt. options, keep_alive, allow_paths: see ModelManager.acquire.
    make_serializer: creates the serializer of the protocol once the model is loaded.
    """

    id: str
    model: str | None
    account: str
    timeout_s: float | None
    requests: tuple[Request, ...]
    n: int = 1
    options: LoadOptions = LoadOptions()
    keep_alive: KeepAlive | None = None
    stream: bool
    make_serializer: Callable[[ResponseMetadata], ResponseSerializer]
    allow_paths: bool = False

    @property
    def deadline_s(self) -> float | None:
        """When the request times out (monotonic seconds), or None if never."""
        return None if self.timeout_s is None else self.requests[0].arrived_s + self.timeout_s


class GenerationResponse(Response):
    """Runs a generation job and sends the answer. Errors before the first event are raised.

    The requests are cancelled in the engine when the client disconnects.
    """

    def __init__(self, manager: ModelManager, journal: RequestLog, job: GenerationJob) -> None:
        super().__init__()
        self._manager = manager
        self._journal = journal
        self._job = job
        self._index = {request.id: index for index, request in enumerate(job.requests)}
        self._finished: dict[str, Finished] = {}
        self._has_begun = False  # the stream, with notices during the load
        self._named, self._own = NamedSettings(""), job.requests[0]
        self._record = RequestRecord(
            id=job.id,
            requested_model=job.model or "",
            client=job.requests[0].client,
            account=job.account,
            arrived_s=job.requests[0].arrived_s,
            n=job.n,
            max_tokens=job.requests[0].params.max_tokens,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked_s = time.monotonic()
        unnamed = self._job.make_serializer(self._metadata())
        waiting = LoadNotices(send, unnamed)
        if self._job.stream:
            waiting.keep_alive(KEEP_ALIVE_S)
        left: RequestStream | None = None
        try:
            job = await self._with_named_settings()
            acquired = self._manager.acquire(
                job.model,
                job.options,
                waiting.update if job.stream else None,
                job.keep_alive,
                allow_paths=job.allow_paths,
                deadline_s=job.deadline_s,
            )
            async with cancel_on_disconnect(receive), acquired as (resident, info):
                self._named.require_ctx(self._own.ctx, info)
                self._record.model = resident.file.name
                self._record.answered_model = answered_name(job.model, resident.file)
                load_ms = (time.monotonic() - asked_s) * 1e3
                stream = resident.engine.submit(*self._requests())
                late = self._start_timeout(stream)
                try:
                    self._has_begun = await waiting.stop()
                    serializer = job.make_serializer(self._metadata(load_ms))
                    await self._respond(stream, serializer, send)
                except asyncio.CancelledError:  # the client has disconnected
                    left = stream
                    stream.cancel()
                    raise
                finally:
                    if left is None:
                        stream.abort()
                    if late is not None:
                        late.cancel()
            if left is not None:  # the model is released before
                await self._record_cancelled(left)
        except LocalgenError as raised:
            error = self._named.explained(raised, self._own.params, self._own.ctx)
            self._record.fail(error.code, error.message)
            if not self._has_begun and not await waiting.stop():
                raise error from None
            body = self._encode_error(unnamed.framing, error.code, error.message, error.param)
            await send({"type": "http.response.body", "body": body})
        except Exception:
            self._record.outcome = LocalgenError.code
            raise
        finally:
            await waiting.stop()
            self._journal.close(self._record)

    async def _with_named_settings(self) -> GenerationJob:
        """The job with the settings of a preset, if its model is one."""
        job = self._job
        name = self._manager.default_name if job.model is None else job.model
        self._named = await NamedSettings.find(name)
        self._job = replace(
            job,
            requests=self._named.apply(job.requests, job.n),
            options=self._named.load_options(job.options, self._own.ctx),
        )
        self._record.max_tokens = self._job.requests[0].params.max_tokens
        return self._job

    def _requests(self) -> tuple[Request, ...]:
        key = self._journal.block_hash_key
        if not key:
            return self._job.requests
        return tuple(replace(request, block_hash_key=key) for request in self._job.requests)

    def _metadata(self, load_ms: float = 0.0) -> ResponseMetadata:
        record = self._record
        return ResponseMetadata(
            id=record.id, model=record.answered_model, arrived_s=record.arrived_s, load_ms=load_ms
        )

    def _start_timeout(self, stream: RequestStream) -> asyncio.TimerHandle | None:
        """Schedule a TimedOut failure at the deadline of the request."""
        deadline_s = self._job.deadline_s
        if deadline_s is None:
            return None
        message = f"the request timed out, the limit is {self._job.timeout_s:g} s"
        left_s = deadline_s - time.monotonic()
        return asyncio.get_running_loop().call_later(left_s, stream.fail, TimedOut.code, message)

    async def _next_events(self, stream: RequestStream) -> list[RequestEvent]:
        events = _until_failure(await stream.next_events())
        self._journal.add_events(self._record, events)
        self._finished |= {end.request_id: end for end in events if isinstance(end, Finished)}
        if self._total is not None:
            self._record.finish(self._total)
        return events

    async def _record_cancelled(self, stream: RequestStream) -> None:
        """Record the figures of cancelled requests, which come at the end of a step."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                events: list[RequestEvent] = []
                while self._total is None and not (events and isinstance(events[-1], Failed)):
                    events = await self._next_events(stream)
        stream.abort()
        self._record.outcome = GONE

    @property
    def _total(self) -> Finished | None:
        """Merged result of all choices; None until all have finished."""
        if len(self._finished) < len(self._index):
            return None
        return merge_finished(
            [self._finished[request_id] for request_id in self._index], self._job.n
        )

    async def _respond(
        self, stream: RequestStream, serializer: ResponseSerializer, send: Send
    ) -> None:
        if self._job.stream:
            await self._keep_alive_until_event(stream, serializer, send)
        events = await self._next_events(stream)
        while self._job.stream and all(isinstance(event, EngineNotice) for event in events):
            await self._begin_stream(serializer.framing, send)
            body = b"".join(self._encode_event(event, serializer) for event in events)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await self._keep_alive_until_event(stream, serializer, send)
            events = await self._next_events(stream)
        _raise_if_failed(events)
        if self._job.stream:
            await self._send_stream(events, stream, serializer, send)
        else:
            await self._send_full(events, stream, serializer, send)

    async def _send_stream(
        self,
        events: list[RequestEvent],
        stream: RequestStream,
        serializer: ResponseSerializer,
        send: Send,
    ) -> None:
        framing = serializer.framing
        await self._begin_stream(framing, send)
        body = b"".join(map(framing.encode_event, self._choice_starts(serializer)))
        while True:
            # all events that arrived during the previous write are sent in one
            body += b"".join(self._encode_event(event, serializer) for event in events)
            ended = self._total is not None or isinstance(events[-1], Failed)
            if self._total is not None:
                body += (
                    b"".join(
                        map(framing.encode_event, serializer.stream_end(self._shown(self._total)))
                    )
                    + framing.terminator
                )
            await send({"type": "http.response.body", "body": body, "more_body": not ended})
            if ended:
                return
            body = b""
            await self._keep_alive_until_event(stream, serializer, send)
            events = await self._next_events(stream)

    async def _begin_stream(self, framing: Framing, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send_stream_headers(send, framing)

    async def _keep_alive_until_event(
        self, stream: RequestStream, serializer: ResponseSerializer, send: Send
    ) -> None:
        """Send something every KEEP_ALIVE_S until the engine does; the first begins the stream."""
        while not await stream.wait(KEEP_ALIVE_S):
            await self._begin_stream(serializer.framing, send)
            body = serializer.keep_alive()
            await send({"type": "http.response.body", "body": body, "more_body": True})

    def _shown(self, finished: Finished) -> Finished:
        """Return the result with our notes, and without the excerpt of an earlier prompt except
        for local clients.

        The earlier prompt may be another person's: without keys, or behind a proxy, several share
        an account.
        """
        if self._named.notes:
            finished = replace(finished, notes=(*self._named.notes, *finished.notes))
        parted = finished.timings.prefix_break
        if parted is None or self._job.allow_paths:
            return finished
        timings = replace(finished.timings, prefix_break=replace(parted, before=""))
        return replace(finished, timings=timings)

    def _choice_starts(self, serializer: ResponseSerializer) -> list[object]:
        return [event for index in self._index.values() for event in serializer.choice_start(index)]

    def _encode_event(self, event: RequestEvent, serializer: ResponseSerializer) -> bytes:
        framing = serializer.framing
        if isinstance(event, EngineNotice):
            return serializer.notice(event)
        index = self._index[event.request_id]
        match event:
            case Delta():
                return b"".join(map(framing.encode_event, serializer.choice_delta(index, event)))
            case Finished():
                ended = serializer.choice_end(index, self._shown(event))
                return b"".join(map(framing.encode_event, ended))
            case Failed(_, code, message, param):
                return self._encode_error(framing, code, message, param)

    def _encode_error(self, framing: Framing, code: str, message: str, param: str | None) -> bytes:
        message = error_message(code, message, param, is_local=self._job.allow_paths)
        return framing.encode_error(code, message, param)

    async def _send_full(
        self,
        events: list[RequestEvent],
        stream: RequestStream,
        serializer: ResponseSerializer,
        send: Send,
    ) -> None:
        deltas: dict[str, list[Delta]] = {request_id: [] for request_id in self._index}
        while True:
            for event in events:
                if isinstance(event, Delta):
                    deltas[event.request_id].append(event)
            if self._total is not None:
                break
            events = await self._next_events(stream)
            _raise_if_failed(events)
        choices = [
            FinishedChoice(parts, self._shown(self._finished[request_id]))
            for request_id, parts in deltas.items()
        ]
        await send_json_response(send, serializer.full_response(choices, self._shown(self._total)))


def _until_failure(events: list[RequestEvent]) -> list[RequestEvent]:
    """Return the events up to the first Failed, which fails the whole response."""
    for at, event in enumerate(events):
        if isinstance(event, Failed):
            return events[: at + 1]
    return events


def _raise_if_failed(events: list[RequestEvent]) -> None:
    last = events[-1]
    if isinstance(last, Failed):
        raise error_from_code(last.code, last.message, last.param)
