"""Engine processes: start, log output, wait, kill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import time
from collections import deque
from dataclasses import dataclass

from localgen.backends.messages import start_process
from localgen.machine.python_process import python_command, python_environment

# command line, without the descriptor of the inherited socket, which follows
EngineCommand = list[str]
LLAMACPP_ENGINE: EngineCommand = python_command("localgen.backends.llamacpp")
CUDA_ENGINE: EngineCommand = python_command("localgen.backends.cuda")

# how often a thread of GCC's OpenMP looks at a barrier before it sleeps, for about a millisecond: a
# third of its default, which takes the core from a thread that the others wait for
_OPENMP_SPINS = "100000"
# how long a spare engine waits for a model
SPARE_TIMEOUT_S = 30.0
_MAX_LAST_LINES = 20
_POLL_S = 0.01
_SLOW_POLL_S = 0.25
_KILL_TIMEOUT_S = 1.0
_log = logging.getLogger("localgen.engine")


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A started process, its output pipe, and the server's end of its socket."""

    process: subprocess.Popen[bytes]
    sock: socket.socket

    @classmethod
    def start(cls, command: EngineCommand) -> EngineProcess:
        """Start an engine that waits for a load request, in a new session: Ctrl+C skips it."""
        process, messages = start_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_engine_environment(),
        )
        messages.sock.setblocking(False)
        return cls(process, messages.sock)

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_running(self) -> bool:
        return self.process.poll() is None

    async def wait(self, timeout_s: float, poll_s: float = _POLL_S) -> int | None:
        """Wait for the exit status. Returns None if the process still runs after the timeout."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (status := self.process.poll()) is None:
            if asyncio.get_running_loop().time() >= deadline:
                return None
            await asyncio.sleep(poll_s)
        return status

    async def wait_or_kill(self, timeout_s: float) -> None:
        """Wait for the process to exit; kill it after the timeout.

        A killed process exits late if the system waits for a disk or a driver that hangs.
        """
        if await self.wait(timeout_s) is not None:
            return
        self.kill()
        if await self.wait(_KILL_TIMEOUT_S) is None:
            _log.warning("engine process %d was killed but has not exited yet", self.pid)
            await self.wait(math.inf, _SLOW_POLL_S)
            _log.info("engine process %d has exited", self.pid)

    def kill(self) -> None:
        """Kill the process and those that it started, which may be stopped or hang as well."""
        if self.is_running():
            os.killpg(self.pid, signal.SIGKILL)


class EngineStarter:
    """Starts engine processes.

    llamacpp_command: of the engine for GGUF models. spare: one that waits for a model already; it
    is used first, or stopped after SPARE_TIMEOUT_S.
    """

    def __init__(self, llamacpp_command: EngineCommand, spare: EngineProcess | None) -> None:
        self._llamacpp_command = llamacpp_command
        self._spare = spare
        self._started_s = time.monotonic()

    def start(self, backend: str) -> EngineProcess:
        """Return a running engine of the backend that waits for a model."""
        if backend == "cuda":
            return EngineProcess.start(CUDA_ENGINE)
        spare, self._spare = self._spare, None
        if spare is not None and spare.is_running():
            return spare
        return EngineProcess.start(self._llamacpp_command)

    async def stop_expired_spare(self) -> None:
        """Stop a spare engine unused for SPARE_TIMEOUT_S. Call this periodically."""
        if time.monotonic() - self._started_s > SPARE_TIMEOUT_S:
            await self.stop_spare()

    async def stop_spare(self) -> None:
        """Stop the spare engine if there is one."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.sock.close()
            if await spare.wait(_KILL_TIMEOUT_S) is None:
                spare.kill()
                await spare.wait(_KILL_TIMEOUT_S)
            if spare.process.stdout is not None:
                spare.process.stdout.close()


def _engine_environment() -> dict[str, str]:
    environment = python_environment()
    # no debugger and backtrace on a native crash
    environment["GGML_NO_BACKTRACE"] = "1"
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _OPENMP_SPINS)
    return environment


def describe_exit_status(status: int | None) -> str:
    """Describe how a process ended. status: None if it still runs."""
    if status is None:
        return "closed its socket"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class EngineLogPipe(asyncio.Protocol):
    """Copies the output of an engine to the log, and keeps the last lines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._partial_line = b""
        self._last_lines: deque[str] = deque(maxlen=_MAX_LAST_LINES)
        self._closed = asyncio.Event()

    @property
    def last_line(self) -> str:
        """The last non-blank line, or an empty string."""
        return next((line for line in reversed(self._last_lines) if line.strip()), "")

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until the engine and its child processes have closed their output."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), timeout_s)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()

    def data_received(self, received: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + received).split(b"\n")
        if len(self._partial_line) > 1 << 16:
            lines, self._partial_line = [*lines, self._partial_line], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            _log.info("%s: %s", self._name, text)
