"""Asyncio client of one engine process: load, submit, cancel, handle crashes."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localgen.backends.engine import wire
from localgen.backends.engine_stats import SAVE_TIMEOUT_S, EngineStats
from localgen.backends.errors import (
    EngineDied,
    InvalidRequest,
    LoadFailed,
    LocalgenError,
    QueueFull,
    error_from_code,
)
from localgen.backends.messages import MAX_FRAME_BYTES, FrameDecoder, encode_frame
from localgen.backends.model_info import ModelInfo, ModelLoadRequest
from localgen.backends.types import (
    Embedded,
    EmbedRequest,
    Failed,
    Finished,
    PromptProgress,
    Request,
    StepEvents,
    Tokenized,
    TokenizeRequest,
)
from localgen.server.models.engine_process import EngineLogPipe, EngineProcess, describe_exit_status
from localgen.server.models.request_stream import RequestStream

# after the socket closes, streams wait this long for the exit status of the process
_EXIT_STATUS_TIMEOUT_S = 0.3
_EXIT_TIMEOUT_S = 3.0
# signals of native crashes: unsupported CPU instructions, malformed model files
_CRASH_SIGNALS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
_log = logging.getLogger("localgen.engine")


class LoadCrashed(LoadFailed):
    """The engine process crashed in native code while loading the model."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """CPU time and I/O counters of a process since its start. io: empty if unknown."""

    cpu_s: float
    io: tuple[int, ...] = ()


@dataclass(slots=True)
class Silence:
    """How long an engine has sent nothing, as EngineWatch counts it.

    hung_s: the part of it that counts towards the hang timeout: while loading, the time since it
    last used the processor or the disk; then the time with unfinished requests, of which the time
    in which it computes counts less. usage: when it was last read, or None if not during this
    silence.
    """

    silent_s: float = 0.0
    hung_s: float = 0.0
    usage: ProcessUsage | None = None


class EngineClient(asyncio.Protocol):
    """The server's connection to an engine process.

    on_death: called when the process ends for another reason than stop().
    """

    def __init__(self, process: EngineProcess, name: str, on_death: Callable[[], None]) -> None:
        self.stats: EngineStats | None = None
        self.stats_received_s = 0.0  # monotonic
        self.held_chunks = b""  # see HeldPrompts.take_report
        self.progress = 0.0
        self.silence = Silence()
        self._process = process
        self._name, self._path = name, name
        self._on_death = on_death
        self._frames = FrameDecoder()
        self._output = EngineLogPipe(name)
        self._streams: dict[str, RequestStream] = {}
        # of requests that end with one event
        self._pending_calls: dict[str, asyncio.Future[Any]] = {}
        self._max_requests: int | None = None  # running and waiting generation requests it accepts
        self._load_future: asyncio.Future[ModelInfo] | None = None
        self._transport: asyncio.Transport | None = None
        self._end_reason: str | None = None  # why it accepts no more requests
        self._cleanup_task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_requests(self) -> bool:
        """True if any request is unfinished."""
        return bool(self._streams or self._pending_calls)

    async def load(self, request: ModelLoadRequest) -> ModelInfo:
        """Load the model, updating `progress`. Raises the error that the engine reports."""
        loop = asyncio.get_running_loop()
        self._load_future = loop.create_future()
        assert self._process.process.stdout is not None
        try:
            await loop.connect_read_pipe(lambda: self._output, self._process.process.stdout)
            transport, _ = await loop.create_connection(lambda: self, sock=self._process.sock)
        except (OSError, ValueError) as error:  # stopped before the load began
            raise LoadFailed(f"cannot load {request.path}: {self._end_reason or error}") from error
        self._transport = transport
        self._path = request.path
        self._send(request)
        return await self._load_future

    def submit(self, *requests: Request) -> RequestStream:
        """Submit one or more requests in one write.

        Raises EngineDied if the process has ended, QueueFull if the queue limit is reached. The
        limit is checked here to reject early, without rendering a template or waiting for a step.
        """
        if (
            self._max_requests is not None
            and len(self._streams) + len(requests) > self._max_requests
        ):
            raise QueueFull(
                f"{len(self._streams)} requests are running or waiting, the limit is "
                f"{self._max_requests}: try again later"
            )
        frames = [self._encode_frame(wire.Submit(request)) for request in requests]
        stream = RequestStream(
            [each.id for each in requests],
            requests[0].account,
            abort=self.abort,
            cancel=self.cancel_request,
        )
        self._streams |= dict.fromkeys((request.id for request in requests), stream)
        self._write(b"".join(frames))
        return stream

    async def embed(self, request: EmbedRequest) -> Embedded:
        """Compute embeddings. Cancellation reaches the engine. Raises the error that it reports."""
        embedded: Embedded = await self._call(request.id, wire.SubmitEmbedding(request))
        return embedded

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Return the prompt of a request as text and tokens. Raises the error of the engine."""
        tokenized: Tokenized = await self._call(request.id, request)
        return tokenized

    async def _call(self, request_id: str, message: wire.WireMessage) -> Any:
        """Send a request and return its end. Cancellation reaches the engine."""
        frame = self._encode_frame(message)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending_calls[request_id] = done
        self._write(frame)
        try:
            return await done
        finally:
            if self._pending_calls.pop(request_id, None) is not None:
                self._send(wire.Cancel(request_id))

    def _encode_frame(self, message: wire.WireMessage) -> bytes:
        """Encode a request. Raises EngineDied if the engine ended, InvalidRequest if too large."""
        if self._end_reason is not None:
            raise EngineDied(self._end_reason)
        frame = encode_frame(wire.CODEC.encode(message))
        if len(frame) > MAX_FRAME_BYTES:
            raise InvalidRequest(
                f"the request is {len(frame) >> 20} MiB, the limit is {MAX_FRAME_BYTES >> 20} "
                "MiB: shorten it"
            )
        return frame

    def abort(self, request_id: str) -> None:
        """Cancel a request without further events; does nothing if it has ended."""
        if self._streams.pop(request_id, None) is not None:
            self._send(wire.Cancel(request_id))

    def cancel_request(self, request_id: str, account: str | None = None) -> bool:
        """Cancel a generation request: it finishes, as cancelled.

        account: of its owner, or None if it does not matter. Returns False if it has ended.
        """
        stream = self._streams.get(request_id)
        if stream is None or account not in (None, stream.account):
            return False
        self._send(wire.Cancel(request_id))
        return True

    def answer_now(self, request_id: str, account: str | None = None) -> bool:
        """End the reasoning of a request, of all its choices; otherwise as cancel_request."""
        running = [
            one
            for one, stream in self._streams.items()
            if f"{one}-".startswith(f"{request_id}-") and account in (None, stream.account)
        ]
        for one in running:
            self._send(wire.AnswerNow(one))
        return bool(running)

    def fail_all(self, code: str, message: str) -> None:
        """Cancel every request and fail its stream with this error."""
        for request_id, stream in list(self._streams.items()):
            self.abort(request_id)
            stream.put(Failed(request_id, code, message))
        for request_id in list(self._pending_calls):
            self._send(wire.Cancel(request_id))
            self._fail_call(Failed(request_id, code, message))

    def announce_silence(self) -> None:
        """Tell the streams how long the engine has sent nothing."""
        for stream in dict.fromkeys(self._streams.values()):
            stream.announce_silence(self.silence.silent_s)

    async def kill(self, reason: str) -> None:
        """Kill the process; the load or the requests fail with this reason."""
        if self._end_reason is not None:
            return
        self._end_reason = reason
        _log.error("%s", reason)
        self._process.kill()
        self._on_death()
        # whoever is told may send the request again, and then its memory must be free
        await self._process.wait(_EXIT_TIMEOUT_S)
        await self.stop(reason)

    async def wait_until_exited(self) -> None:
        """Wait until the process has exited and its memory is free; kill it if that is late."""
        await self._process.wait_or_kill(_EXIT_TIMEOUT_S)

    async def stop(self, reason: str) -> None:
        """Stop the process and wait for its exit, so that its memory is free."""
        if self._end_reason is None:
            self._end_reason = reason
        self._fail_load(LoadFailed(reason))
        self.fail_all(EngineDied.code, reason)
        if self._transport is None:
            self._process.sock.close()
        else:
            self._transport.close()  # the engine exits at the end of its input
        if self._is_saving:
            _log.info("%s: saving prefixes for at most %.0f s", self._name, SAVE_TIMEOUT_S)
        await self._process.wait_or_kill(self._exit_timeout_s)
        if self._transport is not None:
            await self._output.wait_closed(_EXIT_TIMEOUT_S)

    @property
    def _is_saving(self) -> bool:
        """True if an engine that was stopped may have prefixes to write to the disk."""
        stats = self.stats
        return stats is not None and any(
            tier.unsaved_tokens or (tier.tier == "disk" and stats.running)
            for tier in stats.kv_tiers
        )

    @property
    def _exit_timeout_s(self) -> float:
        return _EXIT_TIMEOUT_S + (SAVE_TIMEOUT_S if self._is_saving else 0.0)

    def data_received(self, received: bytes) -> None:
        self.silence = Silence()
        try:
            for content in self._frames.feed(received):
                self._handle_message(wire.CODEC.decode(content))
        except Exception as error:  # an engine that sends invalid messages is unusable
            _log.exception("%s: bad message from the engine", self._name)
            self._mark_dead(f"the engine of {self._name} sent an invalid message: {error}")
            self._process.kill()

    def connection_lost(self, error: Exception | None) -> None:
        unexpected = self._end_reason is None
        if unexpected:
            # reject new requests while the streams wait for the exit status
            self._end_reason = f"the engine process of {self._name} has ended"
            if self._load_future is not None and self._load_future.done():
                self._on_death()
        self._cleanup_task = asyncio.create_task(
            self._handle_crash() if unexpected else self._wait_for_exit()
        )

    async def _wait_for_exit(self) -> None:
        assert self._end_reason is not None
        # requests that were submitted after the engine announced its end
        self.fail_all(EngineDied.code, self._end_reason)
        await self._process.wait_or_kill(self._exit_timeout_s)

    async def _handle_crash(self) -> None:
        status = await self._process.wait(_EXIT_STATUS_TIMEOUT_S)
        last = self._output.last_line
        output = f", its last output: {last[:300]}" if last else ""
        crashed = status is not None and -status in _CRASH_SIGNALS
        message = f"the engine process of {self._name} {describe_exit_status(status)}{output}"
        self._mark_dead(message, LoadCrashed if crashed else LoadFailed)
        await self._process.wait_or_kill(_EXIT_TIMEOUT_S)

    def _mark_dead(self, message: str, error_type: type[LoadFailed] = LoadFailed) -> None:
        self._end_reason = message
        _log.error("%s", message)
        self._fail_load(error_type(f"cannot load {self._path}: {message}"))
        self.fail_all(EngineDied.code, message)
        self._on_death()

    def _handle_message(self, message: wire.WireMessage) -> None:
        match message:
            case StepEvents():
                self._dispatch_events(message)
            case wire.LoadProgress(progress):
                self.progress = progress
            case wire.LoadComplete(info):
                assert self._load_future is not None
                if info.options.max_queue is not None:
                    self._max_requests = info.max_seqs + info.options.max_queue
                if not self._load_future.done():
                    self._load_future.set_result(info)
            case wire.LoadError(code, text):
                self._end_reason = text
                self._fail_load(error_from_code(code, text))
            case _:
                raise ValueError(f"unexpected {type(message).__name__}")

    def _dispatch_events(self, events: StepEvents) -> None:
        if events.stats is not None:
            self.stats, self.stats_received_s = events.stats, time.monotonic()
            for seq in events.stats.sequences:
                # a preempted sequence computes its answer's tokens again, too
                is_prompt = seq.state == "prefill" and not seq.generated_tokens
                if is_prompt and (stream := self._streams.get(seq.request_id)):
                    progress = PromptProgress(seq.computed_tokens, seq.prompt_tokens)
                    stream.announce_progress(progress)
        if events.held_chunks is not None:
            self.held_chunks = events.held_chunks
        dying = next((f.message for f in events.failed if f.code == EngineDied.code), None)
        if dying is not None and self._end_reason is None:
            # it exits in a moment: a retry must start a new engine
            self._end_reason = dying
            self._on_death()
        for delta in events.deltas:
            if stream := self._streams.get(delta.request_id):
                stream.put(delta)
        results: tuple[Embedded | Tokenized, ...] = (*events.embedded, *events.tokenized)
        for done in results:
            if waiting := self._pop_call(done.request_id):
                waiting.set_result(done)
        for failed in events.failed:
            self._fail_call(failed)
        ends: tuple[Finished | Failed, ...] = (*events.finished, *events.failed)
        for end in ends:
            if stream := self._streams.pop(end.request_id, None):
                stream.put(end)

    def _fail_call(self, failed: Failed) -> None:
        if waiting := self._pop_call(failed.request_id):
            waiting.set_exception(error_from_code(failed.code, failed.message, failed.param))

    def _pop_call(self, request_id: str) -> asyncio.Future[Any] | None:
        """Remove a request and return its future, unless its call is about to be cancelled."""
        waiting = self._pending_calls.pop(request_id, None)
        return None if waiting is None or waiting.done() else waiting

    def _fail_load(self, error: LocalgenError) -> None:
        if self._load_future is not None and not self._load_future.done():
            self._load_future.set_exception(error)

    def _send(self, message: wire.WireMessage) -> None:
        self._write(encode_frame(wire.CODEC.encode(message)))

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)
