"""Copies between host and device: several arrays in one transfer, and large ones beside steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HostArray = NDArray[Any]

# bytes that each array of a packed copy is aligned to
_ALIGNMENT = 16
_TORCH_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Host memory for a copy to the device, uint8. Pinned: else the copy would wait for a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def packed_bytes(arrays: Sequence[HostArray]) -> int:
    """Size of the packed arrays."""
    return sum(map(_aligned_bytes, arrays))


def pack(arrays: Sequence[HostArray], device: torch.device) -> Tensor:
    """Concatenate the arrays in host memory, uint8, for a copy to the device."""
    packed = host_buffer(packed_bytes(arrays), device)
    target, at = packed.numpy(), 0
    for array in arrays:
        target[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += _aligned_bytes(array)
    return packed


def unpack(packed: Tensor, like: Sequence[HostArray]) -> list[Tensor]:
    """Views of the arrays in a packed tensor on any device. like: arrays of the same shapes."""
    parts, at = [], 0
    views: dict[torch.dtype, Tensor] = {}  # the packed tensor in each dtype
    for array in like:
        dtype, first = _TORCH_DTYPES[array.dtype], at // array.itemsize
        if dtype not in views:
            views[dtype] = packed.view(dtype)
        part = views[dtype][first : first + array.size]
        parts.append(part if array.ndim == 1 else part.view(array.shape))
        at += _aligned_bytes(array)
    return parts


def to_device(arrays: Sequence[HostArray], device: torch.device) -> list[Tensor]:
    """Copy the arrays to the device in one asynchronous transfer."""
    return unpack(pack(arrays, device).to(device, non_blocking=True), arrays)


def to_device_beside_steps(arrays: Sequence[HostArray], device: torch.device) -> list[Tensor]:
    """Like to_device, but the transfer has a stream of its own and overlaps with running steps.

    Kernels that are launched on the current stream afterwards wait for it.
    """
    if device.type != "cuda":
        return to_device(arrays, device)
    steps, copies = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(copies):
        parts = to_device(arrays, device)
    steps.wait_stream(copies)
    for part in parts:
        part.record_stream(steps)
    return parts


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _aligned_bytes(array: HostArray) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
