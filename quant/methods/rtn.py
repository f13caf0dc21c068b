"""Rounding to the nearest: no calibration, the floor that every other method must beat."""

from __future__ import annotations

from torch import Tensor

from localgen.quant.files.quantized_weight import GroupedWeight
from localgen.quant.methods.clipping import full_range_grid
from localgen.quant.methods.grid import QuantGrid, grouped_weight, split_groups


def round_to_nearest(weight: Tensor, bits: int, group_size: int | None) -> GroupedWeight:
    """A linear's weight [out, in] on grids over the whole range of each group."""
    weights = split_groups(weight, group_size)
    return round_to_grid(full_range_grid(weights, bits), weights)


def round_to_grid(grid: QuantGrid, weights: Tensor) -> GroupedWeight:
    """weights: [out, groups, size]; the grid's [out, groups, 1]."""
    return grouped_weight(grid, grid.quantize(weights).flatten(1))
