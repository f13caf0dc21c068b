"""Cores that other processes leave free: as many threads compute by default.

A thread that shares its core with another process is late at every barrier, and all others wait.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

# the use of the cores is averaged over at least this time
_WINDOW_S = 0.25
# a core counts as taken once others use more of it than this (docs/cpu.md has the measurement)
_TOLERATED_SHARE = 1 / 3


class ProcessorTime(NamedTuple):
    """Processor time in seconds, of this process and of all others on its cores."""

    own_s: float
    others_s: float


def processor_time() -> ProcessorTime:
    """Processor time used so far."""
    allowed, times = _allowed_processors(), psutil.cpu_times(percpu=True)
    busy = ("user", "nice", "system", "irq", "softirq")
    total_s = sum(
        getattr(processor, name, 0.0)
        for number, processor in enumerate(times)
        if number in allowed
        for name in busy
    )
    own_s = time.process_time()
    return ProcessorTime(own_s, total_s - own_s)


def _allowed_processors() -> set[int]:
    """Numbers of the logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


class FreeCores:
    """Counts free cores. cores: physical cores of this process, which are free at first.

    processors: logical processors of this process, default all.
    """

    def __init__(
        self,
        cores: int,
        *,
        processors: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[], ProcessorTime] = processor_time,
    ) -> None:
        self._cores = self._free = cores
        self._processors = processors or len(_allowed_processors())
        self._clock, self._read = clock, read
        self._since_s, self._used = clock(), read()

    def count(self) -> int:
        """Cores that others left free in the last steps; at least 1. Called before each step."""
        now_s = self._clock()
        window_s = now_s - self._since_s
        if window_s >= _WINDOW_S:
            used = self._read()
            # few or no steps ran in this window: no information
            if used.own_s - self._used.own_s >= window_s / 2:
                others = (used.others_s - self._used.others_s) / window_s
                taken = max(0, math.ceil(others - _TOLERATED_SHARE))
                self._free = max(1, min(self._cores, self._processors - taken))
            self._since_s, self._used = now_s, used
        return self._free
