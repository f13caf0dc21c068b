"""One linear's weight as a method leaves it, before a format packs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """Codes in groups of inputs that share a scale and a zero: (code - zero) * scale.

    codes: uint8 [out, in], below 2 ** bits. scales: float32 [out, groups], each a value that
    float16 has. zeros: uint8 [out, groups]. group_index: int32 [in], the group of each input; None:
    they follow the inputs' order.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group_index: Tensor | None = None

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        size = self.codes.shape[1] // self.scales.shape[1]
        groups = self.group_index
        if groups is None:
            groups = torch.arange(self.codes.shape[1], device=self.codes.device) // size
        at = groups.long()
        return (self.codes.float() - self.zeros.float()[:, at]) * self.scales[:, at]


@dataclass(frozen=True, slots=True, eq=False)
class RowWeight:
    """values: int8 or float8_e4m3fn [out, in]. scales: float32 [out, 1]. weight: values * scales.

    quantizes_activations: whether activations are to be rounded to 8 bits too (W8A8).
    """

    values: Tensor
    scales: Tensor
    quantizes_activations: bool = False

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        return self.values.float() * self.scales


QuantizedWeight = GroupedWeight | RowWeight
