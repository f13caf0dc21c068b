"""What calibration multiplies in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def multiplied_in(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it several times as fast as float32, which it does
    on every GPU that the engine runs on, and on CPUs with AVX-512 for it.

    The inputs of linears are rounded to it then, as they are where the model runs.
    """
    if device.type == "cuda" or torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


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
