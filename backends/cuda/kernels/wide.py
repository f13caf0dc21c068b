"""The precision that sums, norms and softmaxes are computed in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x as float32, or as it is if float64."""
    return x if x.dtype is torch.float64 else x.float()
