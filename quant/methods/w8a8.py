"""W8A8 methods: FP8 and SmoothQuant (Xiao et al. 2022), with one scale per output."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.quant.files.packing import RowWeight

_MIN_SCALE = 1e-5


def round_to_fp8(weight: Tensor) -> RowWeight:
    """float8_e4m3fn; each row's maximum becomes the maximum of the type. weight: [out, in]."""
    greatest = torch.finfo(torch.float8_e4m3fn).max
    scales = _row_scales(weight, greatest)
    values = (weight / scales).clamp(-greatest, greatest)
    return RowWeight(values.to(torch.float8_e4m3fn), scales)


def round_to_int8(weight: Tensor) -> RowWeight:
    """Integers from -127 to 127. weight: [out, in]."""
    scales = _row_scales(weight, 127.0)
    values = (weight / scales).round().clamp(-127, 127)
    return RowWeight(values.to(torch.int8), scales)


def _row_scales(weight: Tensor, target_max: float) -> Tensor:
    """float32 [out, 1]: maximum magnitude of each row ÷ target_max."""
    magnitudes = weight.abs().amax(1, keepdim=True)
    # the smallest normal number: dividing by less gives infinities
    scales = (magnitudes / target_max).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(magnitudes > 0, scales, 1.0)


def smoothquant_scales(max_abs: Tensor, weights: list[Tensor], alpha: float) -> Tensor:
    """Factors for the readers' columns and divisors for the channels of their input: [in].

    max_abs: [in], maximum magnitude of each channel in the calibration text. weights: [out, in] of
    all readers. max|x| ** alpha / max|w| ** (1 - alpha), equation 4 of the paper; 1 for channels
    that are always 0.
    """
    columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    scales = (max_abs**alpha / columns.clamp_min(_MIN_SCALE) ** (1.0 - alpha)).clamp_min(_MIN_SCALE)
    return torch.where(max_abs > 0, scales, 1.0)
