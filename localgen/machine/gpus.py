"""NVIDIA GPUs, queried from the driver without loading torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from localgen.backends.machine_stats import GpuStats

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU. index: torch's, which depends on CUDA_VISIBLE_DEVICES.

    bandwidth_bytes_per_s: theoretical memory bandwidth from the driver's figures; 0 if unknown.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    bandwidth_bytes_per_s: float = 0.0


def nvidia_gpus() -> tuple[Gpu, ...]:
    """GPUs visible to a CUDA process; empty without a driver or nvidia-ml-py."""

    def look(nvml: Any) -> tuple[Gpu, ...]:
        handles = _visible([_handle(nvml, i) for i in range(nvml.nvmlDeviceGetCount())])
        return tuple(_gpu(nvml, index, handle) for index, (_, handle) in enumerate(handles))

    return _query_nvml(look) or ()


def read_gpu_metrics() -> tuple[GpuStats, ...]:
    """Current metrics of these GPUs; empty without a driver or nvidia-ml-py."""

    def look(nvml: Any) -> tuple[GpuStats, ...]:
        handles = _visible([_handle(nvml, i) for i in range(nvml.nvmlDeviceGetCount())])
        return tuple(_gpu_metrics(nvml, index, handle) for index, (_, handle) in enumerate(handles))

    return _query_nvml(look) or ()


def gpu_energy_joules() -> float | None:
    """Energy that these GPUs have used since the driver was loaded, in joules.

    None without GPUs, or if the driver does not report it.
    """

    def look(nvml: Any) -> float:
        handles = _visible([_handle(nvml, i) for i in range(nvml.nvmlDeviceGetCount())])
        used_mj: list[int] = [nvml.nvmlDeviceGetTotalEnergyConsumption(each) for _, each in handles]
        return sum(used_mj) / 1e3

    return _query_nvml(look) or None


def process_gpu_bytes(pid: int) -> int | None:
    """Memory in bytes that a process uses on all GPUs.

    Returns None if the driver does not report it, as in containers with their own process ids.
    """

    def look(nvml: Any) -> int:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return sum(_used_bytes(nvml, handle, pid) for handle in handles)

    return _query_nvml(look) or None


def _query_nvml(query: Callable[[Any], _Result]) -> _Result | None:
    """Run a query with NVML. Returns None on an error, or without a driver or nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return query(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, index: int) -> tuple[str, object]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return nvml.nvmlDeviceGetUUID(handle), handle


def _gpu(nvml: Any, index: int, handle: object) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = nvml.nvmlDeviceGetName(handle)
    capability = int(major), int(minor)
    rate = _max_bandwidth(nvml, handle)
    return Gpu(index, str(name), int(memory.total), int(memory.free), capability, rate)


def _gpu_metrics(nvml: Any, index: int, handle: object) -> GpuStats:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def query(ask: Callable[[], float], unit: float = 1.0) -> float | None:
        try:
            return ask() / unit
        except nvml.NVMLError:  # not every GPU reports every metric; a MIG slice reports few
            return None

    return GpuStats(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        busy=query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 100),
        power_w=query(lambda: nvml.nvmlDeviceGetPowerUsage(handle), 1e3),
        power_limit_w=query(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle), 1e3),
        temperature_c=query(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
        clock_mhz=query(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        memory_clock_mhz=query(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
    )


def _max_bandwidth(nvml: Any, handle: object) -> float:
    try:
        clock_mhz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
        bus_bits = nvml.nvmlDeviceGetMemoryBusWidth(handle)
    except nvml.NVMLError:
        return 0.0
    return float(2e6 * clock_mhz * bus_bits / 8)  # two transfers per clock


def _used_bytes(nvml: Any, handle: object, pid: int) -> int:
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(int(one.usedGpuMemory or 0) for one in running if one.pid == pid)


def _visible(handles: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Select and order the GPUs as CUDA_VISIBLE_DEVICES does, by number or UUID prefix.

    As in CUDA, the first invalid entry ends the list.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return handles
    found = []
    for name in map(str.strip, chosen.split(",")):
        if name.isdecimal() and int(name) < len(handles):
            found.append(handles[int(name)])
            continue
        matches = [handle for handle in handles if name and handle[0].startswith(name)]
        if len(matches) != 1:
            break
        found += matches
    return found
