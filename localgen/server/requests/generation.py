"""One request for text: model, engine, answer, and an end to it when the client is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from localgen.backends.errors import LocalgenError, TimedOut, error_of
from localgen.backends.model_info import LoadOptions
from localgen.backends.types import Delta, Failed, Finished, Request
from localgen.server.models.engine_client import Event, Stream
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import KeepAlive
from localgen.server.requests.choices import Choice, together
from localgen.server.requests.protocol import Format, Start
from localgen.server.requests.streaming import cancelled_on_disconnect, send_head, send_json
from localgen.server.stats.request_log import Entry, Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was asked. format_of: how it is printed, once its model is found.

    requests: one for each answer, n of them for each prompt. options, keep_alive: of the model.
    account: who pays for its tokens. timeout_s: how long it may take in all. paths: whether the
    model may be named by its path.
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
    format_of: Callable[[Start], Format]
    paths: bool = False


class GenerationResponse(Response):
    """Answers a job. What fails before the first token is raised, as an HTTP status."""

    def __init__(self, manager: ModelManager, journal: Journal, job: Job) -> None:
        super().__init__()
        self._manager = manager
        self._journal = journal
        self._job = job
        self._index = {request.id: index for index, request in enumerate(job.requests)}
        self._ends: dict[str, Finished] = {}
        self._entry = Entry(
            id=job.id,
            asked=job.model or "",
            client=job.requests[0].client,
            account=job.account,
            arrived_s=job.requests[0].arrived_s,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, asked_s = self._job, time.monotonic()
        try:
            using = self._manager.using(
                job.model, job.options, keep_alive=job.keep_alive, paths=job.paths
            )
            async with cancelled_on_disconnect(receive), using as (resident, _):
                name = self._entry.model = resident.file.name
                load_ms = (time.monotonic() - asked_s) * 1e3
                stream = resident.engine.submit(*job.requests)
                late = self._end_in_time(stream)
                try:
                    start = Start(
                        id=job.id, model=name, arrived_s=self._entry.arrived_s, load_ms=load_ms
                    )
                    await self._answer(stream, job.format_of(start), self._named(send))
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
        left_s = limit_s - (time.monotonic() - self._entry.arrived_s)
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
        events = _to_failure(await stream.take())
        self._entry.see(events)
        self._ends |= {end.request_id: end for end in events if isinstance(end, Finished)}
        if self._total is not None:
            self._entry.finish(self._total)
        return events

    @property
    def _total(self) -> Finished | None:
        """What all answers took together; None: not all have ended."""
        if len(self._ends) < len(self._index):
            return None
        return together([self._ends[request_id] for request_id in self._index], self._job.n)

    async def _answer(self, stream: Stream, answer: Format, send: Send) -> None:
        events = await self._take(stream)
        _require_good(events)
        if self._job.stream:
            await self._send_stream(events, stream, answer, send)
        else:
            await self._send_whole(events, stream, answer, send)

    async def _send_stream(
        self, events: list[Event], stream: Stream, answer: Format, send: Send
    ) -> None:
        framing = answer.framing
        await send_head(send, framing)
        body = b"".join(map(framing.event, self._opening(answer)))
        while True:
            # events that piled up while the socket was busy leave in one write
            body += b"".join(self._encode(event, answer) for event in events)
            ended = self._total is not None or isinstance(events[-1], Failed)
            if self._total is not None:
                body += b"".join(map(framing.event, answer.closing(self._total))) + framing.end
            await send({"type": "http.response.body", "body": body, "more_body": not ended})
            if ended:
                return
            body = b""
            events = await self._take(stream)

    def _opening(self, answer: Format) -> list[object]:
        return [event for index in self._index.values() for event in answer.opening(index)]

    def _encode(self, event: Event, answer: Format) -> bytes:
        framing, index = answer.framing, self._index[event.request_id]
        match event:
            case Delta():
                return b"".join(map(framing.event, answer.delta(index, event)))
            case Finished():
                return b"".join(map(framing.event, answer.ended(index, event)))
            case Failed(_, code, message, param):
                return framing.failed(code, message, param)

    async def _send_whole(
        self, events: list[Event], stream: Stream, answer: Format, send: Send
    ) -> None:
        deltas: dict[str, list[Delta]] = {request_id: [] for request_id in self._index}
        while True:
            for event in events:
                if isinstance(event, Delta):
                    deltas[event.request_id].append(event)
            if self._total is not None:
                break
            events = await self._take(stream)
            _require_good(events)
        choices = [Choice(parts, self._ends[request_id]) for request_id, parts in deltas.items()]
        await send_json(send, answer.whole(choices, self._total))


def _to_failure(events: list[Event]) -> list[Event]:
    """The events up to the first bad end, which is that of them all."""
    for at, event in enumerate(events):
        if isinstance(event, Failed):
            return events[: at + 1]
    return events


def _require_good(events: list[Event]) -> None:
    last = events[-1]
    if isinstance(last, Failed):
        raise error_of(last.code, last.message, last.param)
