"""Copies between host and device: several arrays in one transfer, and large ones beside steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.runner.interface import StepFailed

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
    steps, copies = torch.cuda.current_stream(device), _stream_to_device(device)
    with torch.cuda.stream(copies):
        parts = to_device(arrays, device)
    steps.wait_stream(copies)
    for part in parts:
        part.record_stream(steps)
    return parts


class HostCopy:
    """A copy of a tensor to host memory, which may be in flight.

    host: pinned, unless the tensor was there before. done: follows the copy; None: it is complete.
    """

    def __init__(self, host: Tensor, done: torch.cuda.Event | None) -> None:
        self._host: Tensor | Future[HostArray] = host
        if done is not None:
            self._host = _copy_thread().submit(_to_ordinary_memory, host, done)

    @property
    def is_done(self) -> bool:
        """False if `wait` would wait."""
        return not isinstance(self._host, Future) or self._host.done()

    def wait(self) -> HostArray:
        """The tensor in ordinary memory. Raises MemoryError, StepFailed."""
        return self._host.result() if isinstance(self._host, Future) else self._host.numpy()


def _to_ordinary_memory(pinned: Tensor, done: torch.cuda.Event) -> HostArray:
    """The content of pinned memory, which torch reuses for a later copy."""
    with device_errors():
        done.synchronize()
    return pinned.numpy().copy()


@functools.cache
def _copy_thread() -> ThreadPoolExecutor:
    """One thread: copies are stored in the order in which they were started."""
    return ThreadPoolExecutor(1, thread_name_prefix="copies-to-host")


def to_host_beside_steps(tensor: Tensor) -> HostCopy:
    """Copy a tensor, uint8, that nothing changes afterwards, to host memory.

    The transfer has a stream of its own and waits for what was launched on the current one before;
    a thread takes its content out of pinned memory.
    """
    device = tensor.device
    if device.type != "cuda":
        return HostCopy(tensor, None)
    steps, copies = torch.cuda.current_stream(device), _stream_to_host(device)
    host = host_buffer(tensor.nbytes, device).view(tensor.shape)
    copies.wait_stream(steps)
    with torch.cuda.stream(copies):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(copies)  # its memory is not reused before
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record(copies)
    return HostCopy(host, done)


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Raise MemoryError if memory or threads are exhausted, StepFailed for other errors."""
    try:
        yield
    except RuntimeError as error:
        out_of_memory = ("CUDA error: out of memory", "can't start new thread")
        if isinstance(error, torch.OutOfMemoryError) or any(
            reason in str(error) for reason in out_of_memory
        ):
            raise MemoryError(str(error)) from error
        raise StepFailed(f"the GPU failed to copy the KV cache: {error}") from error


@functools.cache
def _stream_to_device(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _stream_to_host(device: torch.device) -> torch.cuda.Stream:
    """Not the other one: what is loaded would wait for steps that a copy to the host waits for."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _aligned_bytes(array: HostArray) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
