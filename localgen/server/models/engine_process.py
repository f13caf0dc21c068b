"""An engine process as the operating system sees it: started, logged, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from localgen.machine.python_process import python_command, python_environment

# from the number of the inherited socket to the command that serves it
EngineCommand = Callable[[int], list[str]]

_MAX_LAST_LINES = 20
_POLL_S = 0.01
_log = logging.getLogger("localgen.engine")


def llamacpp_engine_command(fd: int) -> list[str]:
    """The engine for GGUF models."""
    return python_command("localgen.backends.llamacpp", str(fd))


def cuda_engine_command(fd: int) -> list[str]:
    """The engine for NVIDIA GPUs."""
    return python_command("localgen.backends.cuda", str(fd))


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process started and the server's end of its socket; what it prints comes over a pipe."""

    process: subprocess.Popen[bytes]
    sock: socket.socket

    @classmethod
    def start(cls, command: EngineCommand) -> EngineProcess:
        """Start one; it waits for the model to load. Its own session: Ctrl+C is for the server."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # a crash in native code is reported as what it is: no debugger, no pages of output
                env=_engine_environment(),
            )
        ours.setblocking(False)
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    async def wait(self, timeout_s: float) -> int | None:
        """Its exit status, or None if it still runs after that time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (status := self.process.poll()) is None:
            if asyncio.get_running_loop().time() >= deadline:
                return None
            await asyncio.sleep(_POLL_S)
        return status

    async def wait_or_kill(self, timeout_s: float) -> int:
        """Wait for it to leave, kill it if it does not; its exit status."""
        status = await self.wait(timeout_s)
        if status is not None:
            return status
        self.process.kill()
        # a killed process leaves as soon as the kernel lets it: releasing memory may take a while
        while (status := await self.wait(1.0)) is None:
            _log.warning("engine process %d is killed but has not left yet", self.pid)
        return status


def _engine_environment() -> dict[str, str]:
    environment = python_environment()
    environment["GGML_NO_BACKTRACE"] = "1"
    # weights in huge pages where the system lets a process ask for them: fewer page table walks
    known = environment.get("GLIBC_TUNABLES")
    if not known or "glibc.malloc.hugetlb" not in known:
        asked = "glibc.malloc.hugetlb=1"
        environment["GLIBC_TUNABLES"] = f"{known}:{asked}" if known else asked
    return environment


def describe_exit_status(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "closed its socket"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class EngineLogPipe(asyncio.Protocol):
    """What an engine prints, line by line into the log; the last lines are kept."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._partial_line = b""
        self._last_lines: deque[str] = deque(maxlen=_MAX_LAST_LINES)
        self._closed = asyncio.Event()

    @property
    def last_line(self) -> str:
        """The last line that says something, or nothing."""
        return next((line for line in reversed(self._last_lines) if line.strip()), "")

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until all who print here are gone: the engine, and processes that it started."""
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
