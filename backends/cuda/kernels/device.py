"""What of a GPU decides how work is cut."""

from __future__ import annotations

from functools import cache

import torch

# compute capabilities that kernels are compiled for in tests
ARCHS = (80, 89, 90, 100, 120)


@cache
def arch_of(device: torch.device) -> int:
    """Compute capability as in sm_90; the least there is where there is none."""
    if device.type != "cuda":
        return ARCHS[0]
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def units_of(device: torch.device) -> int:
    """Multiprocessors; a few where there are none."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
