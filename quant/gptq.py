"""GPTQ (Frantar et al. 2022): column by column, each rounding error made good by those to come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.quant.grid import Grid, grouped, weight_of
from localgen.quant.quantized import GroupedWeight
from localgen.quant.ranges import clipped_grid, whole_grid
from localgen.quant.recipe import Recipe

# columns whose updates are gathered before they reach those further on
_BLOCK = 128
# a Hessian that float32 cannot factor is damped ten times more, so often at most
_TRIES = 5


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """order: int64 [in], the inputs as they are gone through. upper: [in, in], in that order.

    upper: U of H⁻¹ = Uᵀ U, the rows of which say how an error spreads to the columns that follow.
    """

    order: Tensor
    upper: Tensor


def factor(hessian: Tensor, *, damping: float, desc_act: bool, name: str) -> Factor:
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
    for attempt in range(_TRIES):
        damped = hessian[order[:, None], order]
        damped.diagonal().copy_(filled[order] + damping * 10**attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return Factor(order, upper)
    raise LoadFailed(
        f"the inputs of {name} cannot be told apart in the calibration text: calibrate with more "
        "or other text, or raise the damping"
    )


def round_in_order(weight: Tensor, grid: Grid, factor: Factor) -> GroupedWeight:
    """A linear's weight [out, in] on the grid, [out, groups, 1], of groups in the inputs' order.

    Groups stay as they lie in the file whatever the order ("static groups"): files need no g_idx
    to be read and run as fast as without act-order.
    """
    outs, ins = weight.shape
    upper, groups = factor.upper, (factor.order // (ins // grid.scales.shape[1])).tolist()
    scales, zeros = grid.scales[..., 0].t().contiguous(), grid.zeros[..., 0].t().contiguous()
    columns = weight.t()[factor.order]  # [in, out]: what is worked on lies together
    digits = columns.new_empty(ins, outs, dtype=torch.uint8)
    for start in range(0, ins, _BLOCK):
        end = min(start + _BLOCK, ins)
        errors = columns.new_empty(end - start, outs)
        for at in range(start, end):
            here = Grid(scales[groups[at]], zeros[groups[at]], grid.bits)
            found = here.digits(columns[at])
            digits[at] = found
            error = (columns[at] - (found - here.zeros) * here.scales) / upper[at, at]
            columns[at + 1 : end].addr_(upper[at, at + 1 : end], error, alpha=-1)
            errors[at - start] = error
        columns[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    in_file_order = digits[torch.argsort(factor.order)]
    return weight_of(grid, in_file_order.t().contiguous())


def gptq_grid(weight: Tensor, recipe: Recipe) -> Grid:
    """The grid of a weight [out, in]; clipped by its own error, as that of others is made good."""
    weights = grouped(weight, recipe.group_size)
    if recipe.clip:
        return clipped_grid(weights, recipe.bits)
    return whole_grid(weights, recipe.bits)
