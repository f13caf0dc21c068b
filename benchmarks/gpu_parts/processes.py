"""Processes with a time limit, whose output is shown at once and kept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_parts.progress import CASE, progress

ROOT = Path(__file__).parents[2]
# last lines of the output that are kept: tracebacks of all threads
_KEPT_LINES = 200
# a process ends itself at its time limit, counted after its imports; it is killed this much later
_GRACE_S = 20.0
# a process that a driver holds is given up this long after it was killed
_GIVEN_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended. problem: empty if its exit status is 0. lines: the last it printed."""

    problem: str
    lines: tuple[str, ...]

    @property
    def last_case(self) -> str:
        """The case that began last; empty if none did."""
        cases = (line.removeprefix(CASE) for line in reversed(self.lines) if line.startswith(CASE))
        return next(cases, "")

    @property
    def output(self) -> str:
        return "\n".join(self.lines)


class Processes:
    """Runs processes, from any thread. Closing kills those that still run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def run(
        self, name: str, command: Sequence[str], limit_s: float, grace_s: float = _GRACE_S
    ) -> ProcessEnd:
        """Run a command to its end; then kill all processes that it started.

        name: precedes each line of its output. limit_s: at which it should end itself; it is killed
        grace_s later.
        """
        begun_s = time.monotonic()
        process = self._start(command)
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        reader = threading.Thread(target=_relay, args=(process, name, lines), daemon=True)
        reader.start()
        try:
            status: int | None = process.wait(limit_s + grace_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_group(process)
            with self._lock:
                self._running.discard(process)
        reader.join(_GIVEN_UP_S)
        took_s = time.monotonic() - begun_s
        return ProcessEnd(_problem(status, took_s, limit_s, lines), tuple(lines))

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=ROOT,
                start_new_session=True,  # a process group, killed as a whole
            )
            self._running.add(process)
        return process

    def close(self) -> None:
        """Kill what runs, and start nothing more."""
        with self._lock:
            self._closed = True
            for process in list(self._running):
                _kill_group(process)


def _relay(process: subprocess.Popen[str], name: str, lines: deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            progress(f"[{name}] {lines[-1]}")


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GIVEN_UP_S)


def _problem(status: int | None, took_s: float, limit_s: float, lines: Sequence[str]) -> str:
    if status == 0:
        return ""
    if status is None or took_s >= limit_s:
        return f"stopped: it took more than {limit_s:.0f} s"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}: {lines[-1]}" if lines else f"exit status {status}"
