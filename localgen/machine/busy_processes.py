"""The programs that use the processor now, besides localgen."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

_SAMPLE_S = 0.3
_MIN_CORES = 0.1


@dataclass(frozen=True, slots=True)
class BusyProgram:
    """A program, and the cores that all its processes use together."""

    name: str
    cores: float


def busy_programs(sample_s: float = _SAMPLE_S) -> tuple[BusyProgram, ...]:
    """The programs that use the processor, the busiest first, measured for sample_s seconds.

    Only those that this user can see, and none of localgen's own processes.
    """
    before_s, started_s = _processor_seconds(), time.monotonic()
    time.sleep(sample_s)
    passed_s = time.monotonic() - started_s
    cores: defaultdict[str, float] = defaultdict(float)
    for process, used_s in _processor_seconds().items():
        used = (used_s - before_s.get(process, 0.0)) / passed_s
        if used > 0 and not _is_localgen(process):
            cores[_name(process)] += used
    busy = [BusyProgram(name, used) for name, used in cores.items() if used >= _MIN_CORES]
    return tuple(sorted(busy, key=lambda program: -program.cores))


def _processor_seconds() -> dict[psutil.Process, float]:
    seconds = {}
    for process in psutil.process_iter(["cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:  # not allowed, or ended
            seconds[process] = times.user + times.system
    return seconds


def _is_localgen(process: psutil.Process) -> bool:
    try:
        return is_localgen_command(process.cmdline())
    except psutil.Error:
        return False


def is_localgen_command(command: Sequence[str]) -> bool:
    """True for `localgen …`, and for an interpreter that runs it or one of its modules."""
    modules = (module for flag, module in pairwise(command) if flag == "-m")
    programs = [Path(word).name for word in command[:2]]
    return "localgen" in [*programs, *(module.split(".")[0] for module in modules)]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "a program that has ended"
