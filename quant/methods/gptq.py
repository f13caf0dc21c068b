"""GPTQ (Frantar et al. 2022): rounding by columns, each compensating earlier errors.

Errors of the inputs are corrected first, "asymmetric calibration": Arai and Ichikawa 2025 (QEP),
after Li et al. 2025 (GPTAQ).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.quant.files.packing import GroupedWeight
from localgen.quant.methods.grid import QuantGrid, clipped_grid, full_range_grid, split_groups
from localgen.quant.request.recipe import Recipe

# columns rounded one by one
_BLOCK_COLUMNS = 16
# rows of a triangular matrix inverted at a time
_INVERSE_BLOCK_ROWS = 512
# attempts to factor a Hessian, each with ten times the damping
_MAX_DAMPING_TRIES = 5


@dataclass(frozen=True, slots=True, eq=False)
class HessianFactor:
    """column_order: int64 [in], the order in which inputs are rounded.

    inverse_upper: [in, in] in that order, U of H⁻¹ = Uᵀ U; its rows spread an error to the columns
    that follow.
    """

    column_order: Tensor
    inverse_upper: Tensor


def factor_hessian(hessian: Tensor, *, damping: float, desc_act: bool, name: str) -> HessianFactor:
    """Factor shared by all linears that read one input. hessian: [in, in], Σ x xᵀ.

    Inputs that were always 0 ("dead columns") are rounded to nearest, not to 0 as in the paper's
    code: another text may use them, and an expert without tokens has no others. Raises LoadFailed,
    with `name`, if the Hessian cannot be factored.
    """
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = diagonal.mean() if not dead.all() else diagonal.new_ones(())
    filled = torch.where(dead, mean, diagonal)
    order = torch.arange(len(hessian), device=hessian.device)
    if desc_act:
        order = torch.argsort(diagonal, descending=True, stable=True)
    for attempt in range(_MAX_DAMPING_TRIES):
        # reverse the order: with H = L Lᵀ reversed, L⁻¹ reversed is U, and H⁻¹ is never computed
        reverse = order.flip(0)
        damped = hessian[reverse[:, None], reverse]
        damped.diagonal().copy_(filled[reverse] + damping * 10**attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped  # as large as the Hessian
        if not failed:
            return HessianFactor(order, _invert_lower_triangular(lower).flip(0, 1))
    raise LoadFailed(
        f"the Hessian of {name} cannot be factored: its inputs are too similar in the calibration "
        "text; calibrate with more or other text"
    )


def correct_inputs(
    weight: Tensor, mismatch: Tensor, hessian_factor: HessianFactor, share: float
) -> Tensor:
    """The weight [out, in] whose outputs are closest to the original model's before rounding.

    mismatch: [in, in], Σ (x₀ - x) xᵀ with x₀ the input in the original model. The least squares
    solution W + share · W mismatch H⁻¹ for outputs W (x + share · (x₀ - x)) of inputs x (QEP).
    A share below 1 fits the calibration text less. GPTAQ keeps the part of mismatch H⁻¹ that leads
    from a column to those rounded after it.
    """
    order, upper = hessian_factor.column_order, hessian_factor.inverse_upper
    change = (weight @ mismatch)[:, order] @ upper.t() @ upper
    return weight.add(change[:, torch.argsort(order)], alpha=share)


def _invert_lower_triangular(lower: Tensor) -> Tensor:
    """Invert a lower triangular matrix in place, some rows at a time."""
    for start in range(0, len(lower), _INVERSE_BLOCK_ROWS):
        rows = lower[start : start + _INVERSE_BLOCK_ROWS]
        end = start + len(rows)
        eye = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
        corner = torch.linalg.solve_triangular(rows[:, start:end], eye, upper=False)
        rows[:, :start] = -(corner @ (rows[:, :start] @ lower[:start, :start]))
        rows[:, start:end] = corner
    return lower


def round_gptq(weight: Tensor, grid: QuantGrid, hessian_factor: HessianFactor) -> GroupedWeight:
    """Round a weight [out, in] on a grid [out, groups, 1].

    Groups follow the order of the inputs, not the rounding order ("static groups"): files need no
    g_idx and run as fast as without act-order.
    """
    compensated = compensate_errors(weight, grid, hessian_factor)
    return grid.round(split_groups(compensated, len(weight[0]) // grid.scales.shape[1]))


def compensate_errors(weight: Tensor, grid: QuantGrid, hessian_factor: HessianFactor) -> Tensor:
    """The weight [out, in] with the errors of all inputs rounded before added to each input.

    Rounded to nearest on the grid it is GPTQ's result.
    """
    ins = weight.shape[1]
    columns = weight.t()[hessian_factor.column_order]  # [in, out]: each column is contiguous
    state = _GptqState(
        columns=columns,
        errors=torch.empty_like(columns),
        scales=grid.scales[..., 0].t().contiguous(),
        zeros=grid.zeros[..., 0].t().contiguous(),
        bits=grid.bits,
        group_of_column=(hessian_factor.column_order // (ins // grid.scales.shape[1])).tolist(),
        inverse_upper=hessian_factor.inverse_upper,
    )
    state.round_columns(0, ins)
    return columns[torch.argsort(hessian_factor.column_order)].t().contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class _GptqState:
    """Columns of a linear in rounding order, updated in place.

    columns, errors: [in, out]. scales, zeros: [groups, out].
    """

    columns: Tensor
    errors: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group_of_column: list[int]
    inverse_upper: Tensor

    def round_columns(self, start: int, end: int) -> None:
        """Round recursively by halves, so that most updates are large matrix products."""
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
            error = (columns[at] - grid.fake_quantize(columns[at])) / upper[at, at]
            self.errors[at] = error
            columns[at + 1 : end].addr_(upper[at, at + 1 : end], error, alpha=-1)


def gptq_grid(weight: Tensor, recipe: Recipe) -> QuantGrid:
    """The grid of a weight [out, in], clipped by weight error: GPTQ compensates output errors."""
    weights = split_groups(weight, recipe.group_size)
    if recipe.clip:
        return clipped_grid(weights, recipe.bits)
    return full_range_grid(weights, recipe.bits)
