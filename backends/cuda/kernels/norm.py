"""RMSNorm (Zhang and Sennrich 2019), with the residual added before."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: bool, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * weight, x + residual), both [..., size] of x's dtype.

    offset: multiply by 1 + weight, as Gemma does. Sums are taken in float32.
    """
    summed = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    normed = summed.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (1 + weight.float())).to(x.dtype), summed
    return (normed * weight.float()).to(x.dtype), summed
