"""Memory read bandwidth, measured once per machine."""

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

from localgen.backends.memory.system import available_memory_bytes, num_physical_cores
from localgen.machine.gpu_bandwidth import measure_gpu_bandwidth
from localgen.machine.gpus import Gpu

_REVISION = 1  # of the measurement method
_BLOCK_BYTES = 256 << 20  # per thread: far larger than CPU caches
_ROUNDS = 8
_MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth of main memory or a GPU. source: origin of the figure, for users."""

    bytes_per_s: float
    source: str = "measured now"


def bandwidth_cache_path() -> Path:
    """Path of the file with measurements."""
    return platformdirs.user_cache_path("localgen", appauthor=False) / "bandwidth.json"


def memory_bandwidth(*, remeasure: bool = False) -> Bandwidth:
    """Return the cached or measured main memory bandwidth; measuring takes a second or two.

    remeasure: ignore the cache.
    """
    return _cached_or_measured(_machine_key(), measure_ram_bandwidth, remeasure=remeasure)


def gpu_bandwidth(gpu: Gpu, *, remeasure: bool = False) -> Bandwidth | None:
    """Return the cached or measured GPU bandwidth, else the driver's figure, or None if unknown.

    Measuring needs torch.
    """
    found = _cached_or_measured(
        f"{_machine_key()}, {gpu.name}",
        partial(measure_gpu_bandwidth, gpu.index),
        remeasure=remeasure,
    )
    if found.bytes_per_s:
        return found
    return (
        Bandwidth(gpu.bandwidth_bytes_per_s, "reported by the driver")
        if gpu.bandwidth_bytes_per_s
        else None
    )


def cached_memory_bandwidth() -> Bandwidth | None:
    """Return the cached main memory bandwidth, or None. Does not measure."""
    return _cached(_machine_key())


def cached_gpu_bandwidth(gpu: Gpu) -> Bandwidth | None:
    """Return the cached GPU bandwidth, else the driver's figure, or None. Does not measure."""
    by_driver = (
        Bandwidth(gpu.bandwidth_bytes_per_s, "reported by the driver")
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
    if psutil.getloadavg()[0] > num_physical_cores() / 2:
        # other programs take their share: usable now, but not cached
        return Bandwidth(measure(), "measured now, while the machine is busy")
    found = measure()
    if found:
        _write_cache(bandwidth_cache_path(), _read_cache(bandwidth_cache_path()) | {key: found})
    return Bandwidth(found)


def measure_ram_bandwidth(block_bytes: int = _BLOCK_BYTES, rounds: int = _ROUNDS) -> float:
    """Bytes per second: the best of several streaming reads, with one thread and with one per core.

    One core may not saturate the memory, and all cores together may slow each other down.
    """
    import numpy as np

    cores = min(_MAX_THREADS, num_physical_cores())
    block = max(1 << 20, min(block_bytes, available_memory_bytes() // 4 // cores))
    blocks = [np.zeros(block // 8, np.uint64) for _ in range(cores)]
    for each in blocks:
        each.fill(1)  # unwritten pages all map to the same zero page
    # a bitwise or of all words: the cheapest operation that reads them
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        for threads in sorted({1, cores}):
            read = partial(_read, pool, np.bitwise_or.reduce, blocks[:threads])
            best_s = min(_time(read) for _ in range(rounds))
            best = max(best, threads * block / best_s)
    return best


def _read(pool: ThreadPoolExecutor, read: Callable[[Any], object], blocks: list[Any]) -> None:
    """Read each block in its own thread."""
    list(pool.map(read, blocks))


def _time(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _machine_key() -> str:
    """Identifies the machine: several may share a home folder."""
    from localgen.machine.system_info import cpu_name

    total_gb = round(psutil.virtual_memory().total / 1e9)
    return (
        f"{_REVISION}: {platform.node()}, {cpu_name()}, {num_physical_cores()} cores, {total_gb} GB"
    )


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
        with contextlib.suppress(OSError):  # not cached: measured again next time
            partial_path.unlink(missing_ok=True)
