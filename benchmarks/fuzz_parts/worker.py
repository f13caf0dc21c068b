"""Run targets in a process of their own, with bounds of memory and time."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import resource
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil

from benchmarks.fuzz_parts.targets import TARGETS
from localgen.backends.errors import LocalgenError
from localgen.backends.memory.system import peak_memory_bytes
from localgen.machine.python_process import python_command, python_environment

MAX_CPU_S = 10.0
MAX_WALL_S = 120.0
MAX_GROWTH_BYTES = 1 << 30
_ADDRESS_SPACE_BYTES = 3 << 30  # beyond that of the libraries
# a worker that has grown is replaced, so that growth is that of one input
_MAX_INPUTS = 2000


@dataclass(frozen=True, slots=True)
class Outcome:
    """kind: accepted, refused; or a finding: exception, crash, hang, memory.

    where: of a finding, the same for the same defect. detail: traceback or last words.
    """

    kind: str
    where: str = ""
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind not in ("accepted", "refused")


class Worker:
    """Runs inputs one by one, and starts its process again after a crash or a hang."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._num_inputs = 0
        self._folder = TemporaryDirectory(prefix="localgen-fuzz-")
        self._errors = Path(self._folder.name) / "stderr"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def run(self, target: str, content: bytes) -> Outcome:
        """Use one input."""
        if self._num_inputs >= _MAX_INPUTS:
            self._stop()
        process = self._process or self._start()
        path = Path(self._folder.name) / "input"
        path.write_bytes(content)
        used_s = _cpu_s(process.pid)
        self._num_inputs += 1
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"target": target, "path": str(path)}).encode() + b"\n")
        process.stdin.flush()
        deadline_s = time.monotonic() + MAX_WALL_S
        while not select.select([process.stdout], [], [], 0.5)[0]:
            if _cpu_s(process.pid) - used_s > MAX_CPU_S or time.monotonic() > deadline_s:
                where = self._stack(process)
                self._stop()
                detail = f"over {MAX_CPU_S:g} s of processor time\n{where}"
                return Outcome("hang", where.partition("\n")[0], detail)
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            self._stop()
            words = self._errors.read_text(errors="replace")[-2000:]
            return Outcome("crash", f"status {code}", words)
        outcome = Outcome(**json.loads(line))
        if outcome.kind == "memory":
            self._stop()
        return outcome

    def _start(self) -> subprocess.Popen[bytes]:
        self._num_inputs = 0
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                python_command("benchmarks.fuzz_parts.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=python_environment(),
            )
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _stack(self, process: subprocess.Popen[bytes]) -> str:
        """Where the worker is: faulthandler writes it on SIGUSR1."""
        import signal

        before = self._errors.stat().st_size
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        frames = self._errors.read_text(errors="replace")[before:].splitlines()
        ours = [line.strip() for line in frames if "localgen" in line or "backends" in line]
        return "\n".join(ours[:3])


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def judge(target: str, content: bytes) -> Outcome:
    """Use one input in this process."""
    before = peak_memory_bytes()
    try:
        with TemporaryDirectory(prefix="localgen-fuzz-") as folder:
            TARGETS[target].use(content, Path(folder))
        outcome = Outcome("accepted")
    except LocalgenError as error:
        outcome = Outcome("refused", detail=error.message[:200])
    except MemoryError as error:
        return Outcome("memory", _where(error), traceback.format_exc()[-3000:])
    except BaseException as error:  # a panic in Rust is no Exception
        return Outcome("exception", _where(error), traceback.format_exc()[-3000:])
    growth = peak_memory_bytes() - before
    if growth > MAX_GROWTH_BYTES:
        return Outcome("memory", f"{target}: grew", f"{growth:,} bytes more at the peak")
    return outcome


def _where(error: BaseException) -> str:
    """Type and the deepest frame of our own code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and "fuzz_parts" not in frame.filename
    ]
    last = (ours or list(frames))[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}:{last.name}"


def _limit_memory() -> None:
    used = psutil.Process().memory_info().vms
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        limit = used + _ADDRESS_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def _own_output() -> Iterator[IO[bytes]]:
    """The pipe to the parent. What libraries print goes to stderr instead."""
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)
        yield pipe


def main() -> None:
    import signal

    # libraries are loaded before memory is limited
    for target in TARGETS.values():
        for number in range(3):
            judge(target.name, target.make(random.Random(number)))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _limit_memory()
    with _own_output() as pipe:
        for line in sys.stdin.buffer:
            asked: dict[str, Any] = json.loads(line)
            outcome = judge(asked["target"], Path(asked["path"]).read_bytes())
            fields = {"kind": outcome.kind, "where": outcome.where, "detail": outcome.detail}
            pipe.write(json.dumps(fields).encode() + b"\n")
            pipe.flush()


if __name__ == "__main__":
    main()
