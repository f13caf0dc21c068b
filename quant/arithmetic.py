"""What calibration multiplies in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# a model of fewer inputs is done in minutes anyway
_WIDE = 1024


def multiplied_in(device: torch.device, hidden: int) -> torch.dtype:
    """bfloat16 where it saves hours: in models of at least _WIDE hidden states, on hardware that
    multiplies it several times as fast as float32. Every GPU that the engine runs on does, and
    CPUs with AVX-512 for it.

    The inputs of linears are rounded to it then, as they are where the model runs.
    """
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast and hidden >= _WIDE else torch.float32


@contextmanager
def short_factors() -> Iterator[None]:
    """Products of float32 matrices round their factors, to bfloat16 or TF32, where that is faster.
    Those that bfloat16 has anyway stay as they are, and sums are in float32 as ever."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
