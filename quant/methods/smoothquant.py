"""SmoothQuant (Xiao et al. 2023): part of the activations' range moved into the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.quant.files.quantized_weight import RowWeight
from localgen.quant.methods.fp8 import row_scales

_MIN_SCALE = 1e-5


def smoothquant_scales(max_abs: Tensor, weights: list[Tensor], alpha: float) -> Tensor:
    """What to multiply the readers' columns by, and to divide their input's channels by: [in].

    max_abs: [in], each channel's greatest magnitude in the calibration text. weights: [out, in] of
    all that read it. max|x| ** alpha / max|w| ** (1 - alpha), equation 4 of the paper; 1 for
    channels that are always 0.
    """
    columns = (
        torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp_min(_MIN_SCALE)
    )
    scales = (max_abs**alpha / columns ** (1.0 - alpha)).clamp_min(_MIN_SCALE)
    return torch.where(max_abs > 0, scales, 1.0)


def round_to_int8(weight: Tensor) -> RowWeight:
    """Whole numbers from -127 to 127, one scale a row, for activations in 8 bits too (W8A8)."""
    scales = row_scales(weight, 127.0)
    values = (weight / scales).round().clamp(-127, 127)
    return RowWeight(values.to(torch.int8), scales, quantizes_activations=True)
