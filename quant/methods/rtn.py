"""Rounding to the nearest: no calibration, the floor that every other method must beat."""

from __future__ import annotations

from torch import Tensor

from localgen.quant.files.quantized_weight import GroupedWeight
from localgen.quant.methods.clipping import whole_grid
from localgen.quant.methods.grid import Grid, grouped, weight_of


def round_to_nearest(weight: Tensor, bits: int, group_size: int | None) -> GroupedWeight:
    """A linear's weight [out, in] on grids over the whole range of each group."""
    weights = grouped(weight, group_size)
    return round_to(whole_grid(weights, bits), weights)


def round_to(grid: Grid, weights: Tensor) -> GroupedWeight:
    """weights: [out, groups, size]; the grid's [out, groups, 1]."""
    return weight_of(grid, grid.digits(weights).flatten(1))
