"""What of a GPU decides how work is cut."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.launch import current_recording

# compute capabilities that kernels are compiled for in tests
ARCHS = (80, 89, 90, 100, 120)


def upcast(x: Tensor) -> Tensor:
    """x as float32, or as it is if float64."""
    return x if x.dtype is torch.float64 else x.float()


def can_use_triton(x: Tensor) -> bool:
    """Whether kernels can take this tensor; on the meta device they are listed."""
    return x.is_cuda or x.is_meta


def compute_capability(device: torch.device) -> int:
    """Compute capability as in sm_90; the least there is where there is none."""
    return current_recording().arch if device.type == "meta" else _compute_capability(device)


def count_sms(device: torch.device) -> int:
    """Multiprocessors; a few where there are none."""
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
