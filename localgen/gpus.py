"""NVIDIA GPUs as the driver tells of them, without loading torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """index: as torch counts, which CUDA_VISIBLE_DEVICES changes. capability: of its kernels."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]


def nvidia_gpus() -> tuple[Gpu, ...]:
    """The GPUs that a process of ours would see; none without a driver or nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = _visible([_handle(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount())])
        return tuple(_gpu(pynvml, index, handle) for index, (_, handle) in enumerate(handles))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, index: int) -> tuple[str, object]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return nvml.nvmlDeviceGetUUID(handle), handle


def _gpu(nvml: Any, index: int, handle: object) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = nvml.nvmlDeviceGetName(handle)
    return Gpu(index, str(name), int(memory.total), int(memory.free), (int(major), int(minor)))


def _visible(handles: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Those that CUDA_VISIBLE_DEVICES names, by number or by the beginning of the UUID, in its
    order; the first that is none ends the list, as CUDA has it."""
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
