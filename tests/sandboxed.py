"""Objects for tests of the sandbox, which its processes import by name."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

from localgen.backends import sandbox_worker
from localgen.backends.errors import InvalidRequest


class Probe:
    """Does what hostile code might do, and tells who does it."""

    def pid(self) -> int:
        return os.getpid()

    def echo(self, text: str) -> str:
        return text

    def mark_and_wait(self, mark: str) -> str:
        """Write the process id to a file and wait for ever; only return if the file is there."""
        path = Path(mark)
        if path.exists():
            return "repeated"
        partial = path.with_suffix(".partial")
        partial.write_text(str(os.getpid()))
        partial.rename(path)
        while True:
            time.sleep(60)

    def power(self, exponent: int) -> int:
        """Compute for very long in one native call, which keeps the interpreter's lock."""
        return int(pow(7, exponent) > 1)

    def allocate(self, size: int) -> int:
        return len(bytes(size))

    def hold(self, size: int, seconds: float) -> int:
        """Fill memory, and keep it for a while."""
        held = b"a" * size
        time.sleep(seconds)
        return len(held)

    def write(self, size: int) -> str:
        return "a" * size

    def abort(self) -> None:
        os.abort()

    def send_raw(self, parts: list[bytes], pause_s: float = 0.0) -> None:
        """Write to the parent past the worker, each part after a pause; without the alarm."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        with socket.socket(fileno=int(sys.argv[-1])) as parent:
            for part in parts:
                time.sleep(pause_s)
                parent.sendall(part)

    def refuse(self) -> None:
        raise InvalidRequest("not this", param="that")

    def fail(self) -> None:
        raise KeyError("a defect")


def probe_without_memory_limit() -> Probe:
    """A Probe in a process whose memory the system does not limit, as on macOS."""
    sandbox_worker._limit_memory = lambda most_bytes: None
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    return Probe()
