"""GPTQ (Frantar et al. 2022): column by column, each rounding error made good by those to come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.quant.files.quantized_weight import GroupedWeight
from localgen.quant.methods.clipping import clipped_grid, full_range_grid
from localgen.quant.methods.grid import QuantGrid, grouped_weight, split_groups
from localgen.quant.request.recipe import Recipe

# columns that are gone through one by one
_BLOCK_COLUMNS = 16
# rows of a triangle that are inverted at a time
_INVERSE_BLOCK_ROWS = 512
# a Hessian that float32 cannot factor is damped ten times more, so often at most
_MAX_DAMPING_TRIES = 5


@dataclass(frozen=True, slots=True, eq=False)
class HessianFactor:
    """column_order: int64 [in], the inputs as they are gone through. inverse_upper: [in, in], in
    that order.

    inverse_upper: U of H⁻¹ = Uᵀ U, the rows of which say how an error spreads to the columns that
    follow.
    """

    column_order: Tensor
    inverse_upper: Tensor


def factor_hessian(hessian: Tensor, *, damping: float, desc_act: bool, name: str) -> HessianFactor:
    """What linears that read one input share. hessian: [in, in], Σ x xᵀ.

    Inputs that were always 0 ("dead columns") have no say in the order or in each other; they
    are rounded to nearest, not to 0 as in the paper's code: another text may well use them, and
    an expert that no token was routed to has nothing else. LoadFailed: no factor is to be found;
    name says of what.
    """
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = diagonal.mean() if not dead.all() else diagonal.new_ones(())
    filled = torch.where(dead, mean, diagonal)
    order = torch.arange(len(hessian), device=hessian.device)
    if desc_act:
        order = torch.argsort(diagonal, descending=True, stable=True)
    for attempt in range(_MAX_DAMPING_TRIES):
        # last input first: of H = L Lᵀ so turned, L⁻¹ turned back is U, and H⁻¹ is never made
        turned = order.flip(0)
        damped = hessian[turned[:, None], turned]
        damped.diagonal().copy_(filled[turned] + damping * 10**attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped  # as large as the Hessian
        if not failed:
            return HessianFactor(order, _invert_lower_triangular(lower).flip(0, 1))
    raise LoadFailed(
        f"the inputs of {name} cannot be told apart in the calibration text: calibrate with more "
        "or other text, or raise the damping"
    )


def _invert_lower_triangular(lower: Tensor) -> Tensor:
    """The inverse of a lower triangle, in its place, some rows at a time."""
    for start in range(0, len(lower), _INVERSE_BLOCK_ROWS):
        rows = lower[start : start + _INVERSE_BLOCK_ROWS]
        end = start + len(rows)
        eye = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
        corner = torch.linalg.solve_triangular(rows[:, start:end], eye, upper=False)
        rows[:, :start] = -(corner @ (rows[:, :start] @ lower[:start, :start]))
        rows[:, start:end] = corner
    return lower


def round_gptq(weight: Tensor, grid: QuantGrid, hessian_factor: HessianFactor) -> GroupedWeight:
    """A linear's weight [out, in] on the grid, [out, groups, 1], of groups in the inputs' order.

    Groups stay as they lie in the file whatever the order ("static groups"): files need no g_idx
    to be read and run as fast as without act-order.
    """
    outs, ins = weight.shape
    columns = weight.t()[hessian_factor.column_order]  # [in, out]: what is worked on lies together
    work = _GptqState(
        columns=columns,
        errors=torch.empty_like(columns),
        codes=columns.new_empty(ins, outs, dtype=torch.uint8),
        scales=grid.scales[..., 0].t().contiguous(),
        zeros=grid.zeros[..., 0].t().contiguous(),
        bits=grid.bits,
        group_of_column=(hessian_factor.column_order // (ins // grid.scales.shape[1])).tolist(),
        inverse_upper=hessian_factor.inverse_upper,
    )
    work.round_columns(0, ins)
    in_file_order = work.codes[torch.argsort(hessian_factor.column_order)]
    return grouped_weight(grid, in_file_order.t().contiguous())


@dataclass(frozen=True, slots=True, eq=False)
class _GptqState:
    """A linear's columns, as they change, in the order in which they are gone through.

    columns, errors, codes: [in, out]. scales, zeros: [groups, out]. group_of_column: of each
    column.
    """

    columns: Tensor
    errors: Tensor
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group_of_column: list[int]
    inverse_upper: Tensor

    def round_columns(self, start: int, end: int) -> None:
        """By halves: all but the smallest updates are products of large matrices."""
        if end - start <= _BLOCK_COLUMNS:
            self._round_block(start, end)
            return
        middle = (start + end) // 2
        self.round_columns(start, middle)
        spread = self.inverse_upper[start:middle, middle:end].t()
        self.columns[middle:end].addmm_(spread, self.errors[start:middle], alpha=-1)
        self.round_columns(middle, end)

    def _round_block(self, start: int, end: int) -> None:
        columns, upper = self.columns, self.inverse_upper
        for at in range(start, end):
            group = self.group_of_column[at]
            grid = QuantGrid(self.scales[group], self.zeros[group], self.bits)
            found = grid.quantize(columns[at])
            self.codes[at] = found
            error = (columns[at] - (found - grid.zeros) * grid.scales) / upper[at, at]
            self.errors[at] = error
            columns[at + 1 : end].addr_(upper[at, at + 1 : end], error, alpha=-1)


def gptq_grid(weight: Tensor, recipe: Recipe) -> QuantGrid:
    """The grid of a weight [out, in]; clipped by its own error, as that of others is made good."""
    weights = split_groups(weight, recipe.group_size)
    if recipe.clip:
        return clipped_grid(weights, recipe.bits)
    return full_range_grid(weights, recipe.bits)
