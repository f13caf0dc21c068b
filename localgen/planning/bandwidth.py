"""How fast main memory is read, measured once on each machine."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from localgen.backends.memory.available import available_bytes

_REVISION = 1  # of how it is measured
_BLOCK_BYTES = 256 << 20  # of each thread: far more than caches hold
_ROUNDS = 8
_MOST_THREADS = 64


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Of main memory. cached: from an earlier measurement on this machine."""

    bytes_per_s: float
    threads: int
    cached: bool = False


def cache_path() -> Path:
    """Where the measurement of this machine is kept."""
    return platformdirs.user_cache_path("localgen", appauthor=False) / "bandwidth.json"


def memory_bandwidth(*, again: bool = False) -> Bandwidth:
    """Measured now, about a second, or as it was measured before on the same hardware.

    again: measure whether it was or not.
    """
    path, machine = cache_path(), _machine()
    if not again:
        known = _known(path, machine)
        if known is not None:
            return known
    found = measure()
    _keep(path, machine, found)
    return found


def measure(block_bytes: int = _BLOCK_BYTES, rounds: int = _ROUNDS) -> Bandwidth:
    """The best of several streaming reads, by one thread and by one on each core.

    One core may not reach what memory can give, and all of them may get into each other's way.
    """
    import numpy as np

    cores = min(_MOST_THREADS, _cores())
    block = max(1 << 20, min(block_bytes, available_bytes() // 4 // cores))
    blocks = [np.zeros(block // 8, np.uint64) for _ in range(cores)]
    for each in blocks:
        each.fill(1)  # pages that nobody has written to are all the same one
    # an or of all words: the cheapest thing that has to read them
    best = Bandwidth(0.0, 1)
    with ThreadPoolExecutor(cores) as pool:
        for threads in sorted({1, cores}):
            read = partial(_read, pool, np.bitwise_or.reduce, blocks[:threads])
            best_s = min(_timed(read) for _ in range(rounds))
            rate = threads * block / best_s
            best = max(best, Bandwidth(rate, threads), key=lambda found: found.bytes_per_s)
    return best


def _read(pool: ThreadPoolExecutor, read: Callable[[Any], object], blocks: list[Any]) -> None:
    """Each block by a thread of its own."""
    list(pool.map(read, blocks))


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _cores() -> int:
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def _machine() -> str:
    """What tells machines apart that share a home folder."""
    from localgen.doctor.machine import cpu_name

    total_gb = round(psutil.virtual_memory().total / 1e9)
    return f"{_REVISION}: {platform.node()}, {cpu_name()}, {_cores()} cores, {total_gb} GB"


def _known(path: Path, machine: str) -> Bandwidth | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[machine]
        known = Bandwidth(float(found["bytes_per_s"]), int(found["threads"]), cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return known if known.bytes_per_s > 0 else None


def _keep(path: Path, machine: str, found: Bandwidth) -> None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    kept = kept if isinstance(kept, dict) else {}
    kept[machine] = {key: value for key, value in asdict(found).items() if key != "cached"}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)  # it is measured again next time
