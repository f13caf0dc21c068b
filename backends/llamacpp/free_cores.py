"""Cores that other processes leave free: as many threads compute by default.

A thread that shares its core with another process is late at every barrier, and all others wait.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

# the use of the cores is averaged over at least this time; as long without a step is a pause
_WINDOW_S = 0.25
# a core counts as taken once others use more of it than this (docs/cpu.md has the measurement)
_TOLERATED_SHARE = 1 / 3
_PROC_STAT = Path("/proc/stat")
_READINGS = 4
_READING_INTERVAL_S = 0.0005


def time_of_others() -> float:
    """Processor time in seconds that other processes have used on the cores of this one."""
    allowed, times = _allowed_processors(), psutil.cpu_times(percpu=True)
    busy = ("user", "nice", "system", "irq", "softirq")
    total_s = sum(
        getattr(processor, name, 0.0)
        for number, processor in enumerate(times)
        if number in allowed
        for name in busy
    )
    return total_s - time.process_time()


def runnable_others(stat: Path = _PROC_STAT) -> int:
    """Threads of others that run or wait for a core now (proc_stat(5)); 0 if not known.

    The least of a few readings: the server and the client that have handed over a request run on
    for less than a millisecond.
    """
    counts = []
    for number in range(_READINGS):
        time.sleep(_READING_INTERVAL_S if number else 0)
        counts.append(_num_running(stat))
    return min(counts) - 1  # without the thread that reads


def _num_running(stat: Path) -> int:
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    return int(next((line.split()[1] for line in lines if line.startswith("procs_running ")), 1))


def _allowed_processors() -> set[int]:
    """Numbers of the logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


class FreeCores:
    """Counts free cores while steps run. cores: physical cores of this process, free at first.

    After a pause, cores that others used during it count as taken only if others also run now: a
    build may have ended, and a prompt computed on half of the cores would take twice as long. And
    the client that sent the prompt runs only until it has sent it.

    processors: logical processors of this process, default all.
    """

    def __init__(
        self,
        cores: int,
        *,
        processors: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[], float] = time_of_others,
        running: Callable[[], int] = runnable_others,
    ) -> None:
        self._cores = self._free = cores
        self._processors = processors or len(_allowed_processors())
        self._clock, self._read, self._running = clock, read, running
        self._since_s = self._ended_s = clock()
        self._others_s = read()

    def count(self) -> int:
        """Cores that others left free in the last steps or the pause; at least 1.

        Called before each step.
        """
        now_s = self._clock()
        window_s = now_s - self._since_s
        if window_s >= _WINDOW_S:
            others_s = self._read()
            share = (others_s - self._others_s) / window_s
            if share > _TOLERATED_SHARE and now_s - self._ended_s >= _WINDOW_S:  # after a pause
                share = min(share, self._running())
            taken = max(0, math.ceil(share - _TOLERATED_SHARE))
            self._free = max(1, min(self._cores, self._processors - taken))
            self._since_s, self._others_s = now_s, others_s
        return self._free

    def end_step(self) -> None:
        """Called after each step."""
        self._ended_s = self._clock()
