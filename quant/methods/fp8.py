"""Weights in 8 bits with one scale for each output."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.quant.files.quantized_weight import RowWeight


def round_to_fp8(weight: Tensor) -> RowWeight:
    """float8_e4m3fn, the greatest of each row at the type's greatest. weight: [out, in]."""
    greatest = torch.finfo(torch.float8_e4m3fn).max
    scales = row_scales(weight, greatest)
    values = (weight / scales).clamp(-greatest, greatest)
    return RowWeight(values.to(torch.float8_e4m3fn), scales)


def row_scales(weight: Tensor, target_max: float) -> Tensor:
    """float32 [out, 1]: each row's greatest magnitude ÷ what it is to become."""
    magnitudes = weight.abs().amax(1, keepdim=True)
    # the least normal number: dividing by less gives infinities
    scales = (magnitudes / target_max).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(magnitudes > 0, scales, 1.0)
