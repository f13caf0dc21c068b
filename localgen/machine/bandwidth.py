"""Memory read bandwidth, measured once per machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from localgen.backends.memory.system import available_memory_bytes, num_physical_cores
from localgen.machine.gpu_bandwidth import measure_gpu_bandwidth
from localgen.machine.gpus import Gpu
from localgen.machine.measurements import cached_measurement, cached_or_measured

_REVISION = 1  # of the measurement method
_RAM = f"memory bandwidth {_REVISION}"
_BLOCK_BYTES = 256 << 20  # per thread: far larger than CPU caches
_ROUNDS = 8
_MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth of main memory or a GPU. source: origin of the figure, for users."""

    bytes_per_s: float
    source: str = "measured now"


def memory_bandwidth(*, remeasure: bool = False) -> Bandwidth:
    """Return the cached or measured main memory bandwidth; measuring takes a second or two.

    remeasure: ignore the cache.
    """
    found = cached_or_measured(_RAM, float, measure_ram_bandwidth, remeasure=remeasure)
    return Bandwidth(found.value, found.source)


def gpu_bandwidth(gpu: Gpu, *, remeasure: bool = False) -> Bandwidth | None:
    """Return the cached or measured GPU bandwidth, else the driver's figure, or None if unknown.

    Measuring needs torch.
    """
    measure = partial(measure_gpu_bandwidth, gpu.index)
    found = cached_or_measured(_gpu_name(gpu), float, measure, remeasure=remeasure)
    return Bandwidth(found.value, found.source) if found.value else _reported_bandwidth(gpu)


def cached_memory_bandwidth() -> Bandwidth | None:
    """Return the cached main memory bandwidth, or None. Does not measure."""
    found = cached_measurement(_RAM, float)
    return Bandwidth(found.value, found.source) if found else None


def cached_gpu_bandwidth(gpu: Gpu) -> Bandwidth | None:
    """Return the cached GPU bandwidth, else the driver's figure, or None. Does not measure."""
    found = cached_measurement(_gpu_name(gpu), float)
    return Bandwidth(found.value, found.source) if found else _reported_bandwidth(gpu)


def _gpu_name(gpu: Gpu) -> str:
    return f"bandwidth {_REVISION} of {gpu.name}"


def _reported_bandwidth(gpu: Gpu) -> Bandwidth | None:
    if not gpu.bandwidth_bytes_per_s:
        return None
    return Bandwidth(gpu.bandwidth_bytes_per_s, "reported by the driver")


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
