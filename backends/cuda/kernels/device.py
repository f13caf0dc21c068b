"""Device properties that the kernel launchers use."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.launch import current_recording

# compute capabilities that the tests compile kernels for
ARCHS = (80, 89, 90, 100, 120)


def upcast(x: Tensor) -> Tensor:
    """Convert to float32; float64 stays float64."""
    return x if x.dtype is torch.float64 else x.float()


def can_use_triton(x: Tensor) -> bool:
    """True for CUDA tensors, and for meta tensors, whose launches are recorded."""
    return x.is_cuda or x.is_meta


def compute_capability(device: torch.device) -> int:
    """Return the compute capability, 90 for sm_90. Without a GPU: the lowest of ARCHS."""
    return current_recording().arch if device.type == "meta" else _compute_capability(device)


def count_sms(device: torch.device) -> int:
    """Return the number of SMs. Without a GPU: 4."""
    return current_recording().num_sms if device.type == "meta" else _count_sms(device)


@cache
def _compute_capability(device: torch.device) -> int:
    if device.type != "cuda":
        return ARCHS[0]
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _count_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
