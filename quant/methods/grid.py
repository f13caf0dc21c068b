"""The values that a group of weights can take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.quant.files.quantized_weight import GroupedWeight

# the least that float16 has: scales are stored in it
_MIN_SCALE = 2.0**-24


@dataclass(frozen=True, slots=True, eq=False)
class QuantGrid:
    """(code - zero) * scale for codes below 2 ** bits.

    scales: of float16's values, in the weights' dtype. zeros: whole numbers from 1 to
    2 ** bits - 1. Both of one shape that broadcasts against the weights': [out, groups, 1]
    against [out, groups, size].
    """

    scales: Tensor
    zeros: Tensor
    bits: int

    def quantize(self, weights: Tensor) -> Tensor:
        """Those of the nearest values; whole numbers of the weights' dtype."""
        # in place: these are the largest tensors of a search
        found = torch.round(weights / self.scales)
        return found.add_(self.zeros).clamp_(0, 2**self.bits - 1)

    def fake_quantize(self, weights: Tensor) -> Tensor:
        """The values that weights are rounded to."""
        return self.quantize(weights).sub_(self.zeros).mul_(self.scales)


def grid_from_range(low: Tensor, high: Tensor, bits: int) -> QuantGrid:
    """The grid over a range from low (at most 0) to high (at least 0); 0 itself is on it.

    GPTQ's first file layout stores zero - 1, so a zero of 0 cannot be told from 2 ** bits in it:
    the least zero is 1, even where no weight is negative.
    """
    top = 2**bits - 1
    scales = torch.maximum((high - low) / top, high / (top - 1))
    scales = torch.where(scales > 0, scales, 1.0).clamp_min(_MIN_SCALE)
    scales = scales.clamp_max(torch.finfo(torch.float16).max).half().to(low.dtype)
    return QuantGrid(scales, torch.round(-low / scales).clamp_(1, top), bits)


def range_with_zero(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest of the last dimension, 0 among them; that dimension stays, as 1."""
    low, high = weights.aminmax(dim=-1, keepdim=True)
    return low.clamp_max(0), high.clamp_min(0)


def split_groups(weight: Tensor, group_size: int | None) -> Tensor:
    """[out, in] as [out, groups, group_size]. None: one group."""
    return weight.reshape(len(weight), -1, group_size or weight.shape[1])


def concat_grids(grids: Iterable[QuantGrid]) -> QuantGrid:
    """Grids of rows that follow each other as one."""
    parts = list(grids)
    scales = torch.cat([part.scales for part in parts])
    return QuantGrid(scales, torch.cat([part.zeros for part in parts]), parts[0].bits)


def grouped_weight(grid: QuantGrid, codes: Tensor) -> GroupedWeight:
    """codes: [out, in], whole numbers on the grid, [out, groups, 1]."""
    return GroupedWeight(
        codes=codes.to(torch.uint8),
        scales=grid.scales.squeeze(-1).float(),
        zeros=grid.zeros.squeeze(-1).to(torch.uint8),
        bits=grid.bits,
    )
