"""How fast memory is read, measured once on each machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from localgen.backends.memory.system import available_memory_bytes
from localgen.machine.gpu_bandwidth import measure_gpu_bandwidth
from localgen.machine.gpus import Gpu

_REVISION = 1  # of how it is measured
_BLOCK_BYTES = 256 << 20  # of each thread: far more than caches hold
_ROUNDS = 8
_MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Of main memory or a GPU's. source: where the figure is from, in words."""

    bytes_per_s: float
    source: str = "measured now"


def bandwidth_cache_path() -> Path:
    """Where measurements are kept."""
    return platformdirs.user_cache_path("localgen", appauthor=False) / "bandwidth.json"


def memory_bandwidth(*, remeasure: bool = False) -> Bandwidth:
    """Measured, which takes a second or two, or as it was measured before on the same hardware.

    remeasure: measure whether it was or not.
    """
    return _cached_or_measured(_machine_key(), measure_ram_bandwidth, remeasure=remeasure)


def gpu_bandwidth(gpu: Gpu, *, remeasure: bool = False) -> Bandwidth | None:
    """The same of a GPU, where torch is installed; else by the driver's figures. None: unknown."""
    found = _cached_or_measured(
        f"{_machine_key()}, {gpu.name}",
        partial(measure_gpu_bandwidth, gpu.index),
        remeasure=remeasure,
    )
    if found.bytes_per_s:
        return found
    return (
        Bandwidth(gpu.bandwidth_bytes_per_s, "as the driver says")
        if gpu.bandwidth_bytes_per_s
        else None
    )


def cached_memory_bandwidth() -> Bandwidth | None:
    """As memory_bandwidth() where it was measured before; None: it was not. Measures nothing."""
    return _cached(_machine_key())


def cached_gpu_bandwidth(gpu: Gpu) -> Bandwidth | None:
    """The same of a GPU; without a measurement by the driver's figures."""
    by_driver = (
        Bandwidth(gpu.bandwidth_bytes_per_s, "as the driver says")
        if gpu.bandwidth_bytes_per_s
        else None
    )
    return _cached(f"{_machine_key()}, {gpu.name}") or by_driver


def _cached(key: str) -> Bandwidth | None:
    rate = _read_cache(bandwidth_cache_path()).get(key)
    if not isinstance(rate, (int, float)) or rate <= 0:
        return None
    return Bandwidth(float(rate), "measured before")


def _cached_or_measured(key: str, measure: Callable[[], float], *, remeasure: bool) -> Bandwidth:
    found_before = _cached(key)
    if not remeasure and found_before is not None:
        return found_before
    if psutil.getloadavg()[0] > _cores() / 2:
        # others take their part of it: good enough for now, not to be kept
        return Bandwidth(measure(), "measured now, while the machine is busy")
    found = measure()
    if found:
        _write_cache(bandwidth_cache_path(), _read_cache(bandwidth_cache_path()) | {key: found})
    return Bandwidth(found)


def measure_ram_bandwidth(block_bytes: int = _BLOCK_BYTES, rounds: int = _ROUNDS) -> float:
    """Bytes a second, the best of several streaming reads, by one thread and by one on each core.

    One core may not reach what memory can give, and all of them may get into each other's way.
    """
    import numpy as np

    cores = min(_MAX_THREADS, _cores())
    block = max(1 << 20, min(block_bytes, available_memory_bytes() // 4 // cores))
    blocks = [np.zeros(block // 8, np.uint64) for _ in range(cores)]
    for each in blocks:
        each.fill(1)  # pages that nobody has written to are all the same one
    # an or of all words: the cheapest thing that has to read them
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        for threads in sorted({1, cores}):
            read = partial(_read, pool, np.bitwise_or.reduce, blocks[:threads])
            best_s = min(_time(read) for _ in range(rounds))
            best = max(best, threads * block / best_s)
    return best


def _read(pool: ThreadPoolExecutor, read: Callable[[Any], object], blocks: list[Any]) -> None:
    """Each block by a thread of its own."""
    list(pool.map(read, blocks))


def _time(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _cores() -> int:
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def _machine_key() -> str:
    """What tells machines apart that share a home folder."""
    from localgen.machine.system_info import cpu_name

    total_gb = round(psutil.virtual_memory().total / 1e9)
    return f"{_REVISION}: {platform.node()}, {cpu_name()}, {_cores()} cores, {total_gb} GB"


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_cache(path: Path, rates: dict[str, Any]) -> None:
    partial_path = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path.write_text(json.dumps(rates, indent=1), encoding="utf-8")
        partial_path.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # it is measured again next time
            partial_path.unlink(missing_ok=True)
