"""One engine process, for asyncio: load, submit, cancel, and what happens when it dies."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence

from localgen.backends.engine import wire
from localgen.backends.errors import (
    EngineDied,
    InvalidRequest,
    LoadFailed,
    LocalgenError,
    QueueFull,
    error_of,
)
from localgen.backends.model_info import Load, ModelInfo
from localgen.backends.types import (
    Delta,
    Embedded,
    EmbedRequest,
    EngineStats,
    Failed,
    Finished,
    Request,
    StepEvents,
)
from localgen.server.models.engine_process import EngineOutput, EngineProcess, describe_status

Event = Delta | Finished | Failed

# after its socket closed, a process is given this long to show why; streams wait for it
_STATUS_WAIT_S = 0.3
_LEAVE_S = 3.0
# what code that does not suit the processor, or a file it cannot digest, ends in
_FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
_log = logging.getLogger("localgen.engine")


class LoadCrashed(LoadFailed):
    """The engine process was killed by a fault of its machine code while it loaded the model."""


class Stream:
    """The events of one request or of several, in order; the last one of each is a Finished or a
    Failed."""

    __slots__ = ("_engine", "_events", "_request_ids", "_wake")

    def __init__(self, engine: Engine, request_ids: Sequence[str]) -> None:
        self._engine = engine
        self._request_ids = request_ids
        self._events: list[Event] = []
        self._wake = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event and wake who waits."""
        self._events.append(event)
        self._wake.set()

    async def take(self) -> list[Event]:
        """Everything that came since the last call, at least one event."""
        await self._wake.wait()
        self._wake.clear()
        events, self._events = self._events, []
        return events

    def cancel(self) -> None:
        """End what has not ended in the engine now; no event follows."""
        for request_id in self._request_ids:
            self._engine.cancel(request_id)

    def fail(self, code: str, message: str) -> None:
        """End what has not ended in the engine now, with this as the last event."""
        self.cancel()
        self.put(Failed(self._request_ids[0], code, message))


class Engine(asyncio.Protocol):
    """The server's end of an engine process.

    on_death is called once, when the process is gone for another reason than stop().
    """

    def __init__(self, process: EngineProcess, name: str, on_death: Callable[[], None]) -> None:
        self.stats: EngineStats | None = None
        self.progress = 0.0
        self._process = process
        self._name, self._path = name, name
        self._on_death = on_death
        self._decoder = wire.Decoder()
        self._output = EngineOutput(name)
        self._streams: dict[str, Stream] = {}
        self._vectors: dict[str, asyncio.Future[Embedded]] = {}
        self._most: int | None = None  # requests for text that it can have: in steps, and waiting
        self._loaded: asyncio.Future[ModelInfo] | None = None
        self._transport: asyncio.Transport | None = None
        self._ended: str | None = None  # why nothing can be asked of it any more
        self._burial: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        return len(self._streams) + len(self._vectors)

    async def load(self, request: Load) -> ModelInfo:
        """Load the model; progress is updated meanwhile. Raises what the engine reports."""
        loop = asyncio.get_running_loop()
        self._loaded = loop.create_future()
        assert self._process.process.stdout is not None
        try:
            await loop.connect_read_pipe(lambda: self._output, self._process.process.stdout)
            transport, _ = await loop.create_connection(lambda: self, sock=self._process.sock)
        except (OSError, ValueError) as error:  # stopped before it had begun
            raise LoadFailed(f"cannot load {request.path}: {self._ended or error}") from error
        self._transport = transport
        self._path = request.path
        self._send(request)
        return await self._loaded

    def submit(self, *requests: Request) -> Stream:
        """Hand over a request, or several in one go. EngineDied if the process is gone, QueueFull
        if it would refuse for sure: said here, that takes no template and waits for no step."""
        if self._most is not None and len(self._streams) + len(requests) > self._most:
            raise QueueFull(
                f"{len(self._streams)} requests are running or waiting, the limit is "
                f"{self._most}: try again later"
            )
        frames = [self._frame(wire.Submit(request)) for request in requests]
        stream = Stream(self, [request.id for request in requests])
        self._streams |= dict.fromkeys((request.id for request in requests), stream)
        self._write(b"".join(frames))
        return stream

    async def embed(self, request: EmbedRequest) -> Embedded:
        """Vectors of texts; cancelled in the engine too. Raises what the engine reports."""
        frame = self._frame(wire.Embed(request))
        done: asyncio.Future[Embedded] = asyncio.get_running_loop().create_future()
        self._vectors[request.id] = done
        self._write(frame)
        try:
            return await done
        finally:
            if self._vectors.pop(request.id, None) is not None:
                self._send(wire.Cancel(request.id))

    def _frame(self, message: wire.Message) -> bytes:
        """A request for the wire. EngineDied, InvalidRequest: it cannot be sent."""
        if self._ended is not None:
            raise EngineDied(self._ended)
        frame = wire.encode(message)
        if len(frame) > wire.MAX_FRAME_BYTES:
            raise InvalidRequest(
                f"the request is {len(frame) >> 20} MiB, at most {wire.MAX_FRAME_BYTES >> 20} "
                "reach a model: shorten it"
            )
        return frame

    def cancel(self, request_id: str) -> None:
        """End a request; nothing happens if it has ended."""
        if self._streams.pop(request_id, None) is not None:
            self._send(wire.Cancel(request_id))

    def end(self, request_id: str) -> bool:
        """End a request for text as if its client had had enough: what there is of its answer
        stays, and it finishes as cancelled. False: it has ended."""
        if request_id not in self._streams:
            return False
        self._send(wire.Cancel(request_id))
        return True

    def fail_all(self, code: str, message: str) -> None:
        """End every stream with this error, and the requests in the engine."""
        for request_id, stream in list(self._streams.items()):
            self.cancel(request_id)
            stream.put(Failed(request_id, code, message))
        for request_id in list(self._vectors):
            self._send(wire.Cancel(request_id))
            self._fail_vectors(Failed(request_id, code, message))

    async def stop(self, reason: str) -> None:
        """End the process; its memory is free when this returns."""
        if self._ended is None:
            self._ended = reason
        self._fail_load(LoadFailed(reason))
        self.fail_all(EngineDied.code, reason)
        if self._transport is None:
            self._process.sock.close()
        else:
            self._transport.close()  # end of stream: the engine leaves
        await self._process.end(_LEAVE_S)
        if self._transport is not None:
            await self._output.closed(_LEAVE_S)

    def data_received(self, received: bytes) -> None:
        try:
            for message in self._decoder.feed(received):
                self._handle(message)
        except Exception as error:  # whatever it sent, this engine cannot be trusted any more
            _log.exception("%s: bad message from the engine", self._name)
            self._die(f"the engine of {self._name} sent what is not understood: {error}")
            self._process.process.kill()

    def connection_lost(self, error: Exception | None) -> None:
        unexpected = self._ended is None
        if unexpected:
            # nothing more is asked of it, while its streams wait to learn why
            self._ended = f"the engine process of {self._name} is gone"
            if self._loaded is not None and self._loaded.done():
                self._on_death()
        self._burial = asyncio.create_task(self._bury() if unexpected else self._leave())

    async def _leave(self) -> None:
        assert self._ended is not None
        self.fail_all(EngineDied.code, self._ended)  # what reached it when it had told of its end
        await self._process.end(_LEAVE_S)

    async def _bury(self) -> None:
        status = await self._process.wait(_STATUS_WAIT_S)
        last = self._output.last_line
        said = f", its last words: {last[:300]}" if last else ""
        crashed = status is not None and -status in _FAULTS
        message = f"the engine process of {self._name} {describe_status(status)}{said}"
        self._die(message, LoadCrashed if crashed else LoadFailed)
        await self._process.end(_LEAVE_S)

    def _die(self, message: str, kind: type[LoadFailed] = LoadFailed) -> None:
        self._ended = message
        _log.error("%s", message)
        self._fail_load(kind(f"cannot load {self._path}: {message}"))
        self.fail_all(EngineDied.code, message)
        self._on_death()

    def _handle(self, message: wire.Message) -> None:
        match message:
            case StepEvents():
                self._publish(message)
            case wire.Loading(progress):
                self.progress = progress
            case wire.Loaded(info):
                assert self._loaded is not None
                if info.options.max_queue is not None:
                    self._most = info.max_seqs + info.options.max_queue
                if not self._loaded.done():
                    self._loaded.set_result(info)
            case wire.LoadError(code, text):
                self._ended = text
                self._fail_load(error_of(code, text))
            case _:
                raise ValueError(f"unexpected {type(message).__name__}")

    def _publish(self, events: StepEvents) -> None:
        if events.stats is not None:
            self.stats = events.stats
        dying = next((f.message for f in events.failed if f.code == EngineDied.code), None)
        if dying is not None and self._ended is None:
            # it leaves in a moment: whoever reads of that and asks again gets another
            self._ended = dying
            self._on_death()
        for delta in events.deltas:
            if stream := self._streams.get(delta.request_id):
                stream.put(delta)
        for done in events.embedded:
            if waiting := self._vectors.pop(done.request_id, None):
                waiting.set_result(done)
        for failed in events.failed:
            self._fail_vectors(failed)
        ends: tuple[Finished | Failed, ...] = (*events.finished, *events.failed)
        for end in ends:
            if stream := self._streams.pop(end.request_id, None):
                stream.put(end)

    def _fail_vectors(self, end: Failed) -> None:
        if waiting := self._vectors.pop(end.request_id, None):
            waiting.set_exception(error_of(end.code, end.message, end.param))

    def _fail_load(self, error: LocalgenError) -> None:
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(error)

    def _send(self, message: wire.Message) -> None:
        self._write(wire.encode(message))

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)
