"""AWQ (Lin et al. 2023): channels that matter are scaled up, then ranges clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.quant.calibrate.input_stats import Moments
from localgen.quant.calibrate.scaling import Junction
from localgen.quant.files.quantized_weight import GroupedWeight
from localgen.quant.methods.clipping import clipped_grid, whole_grid
from localgen.quant.methods.grid import Grid, grouped
from localgen.quant.methods.rtn import round_to
from localgen.quant.request.recipe import Recipe

# powers of the activations' magnitudes that are tried: 0, 1 / 20, …, 1, then half a step to both
# sides of the best one
_POWERS = 20
_LEAST = 1e-8
# outputs whose error decides, of all readers together: every n-th of more than that; of wide
# inputs fewer, for each costs their square
_ROWS = 1024
_LEAST_ROWS = 256
_WEIGHTS = 1 << 21


def best_scales(
    junction: Junction, weights: list[Tensor], moments: Moments, recipe: Recipe
) -> Tensor:
    """The scales s of one input's channels whose rounded readers err least: float32 [in].

    weights: [out, in] of all readers. moments: of the input, with its Hessian. The error is that
    of the readers' outputs over the calibration text, Σ ‖(Q(W s) / s - W) x‖², which the Hessian
    tells without the text; of many outputs a share has to do. Tried are powers of the mean
    magnitudes (equation 5 of the paper).
    """
    rows = min(_ROWS, max(_LEAST_ROWS, _WEIGHTS // weights[0].shape[1]))
    every = max(1, sum(map(len, weights)) // rows)
    sample = torch.cat([weight[::every] for weight in weights])
    magnitudes = junction.shared(moments.magnitudes / max(moments.count, 1)).clamp_min(_LEAST)

    def scales(power: float) -> Tensor:
        found = magnitudes**power
        # how large they are as a whole is free: their middle goes to 1
        return found / (found.amax() * found.amin()).sqrt()

    def error(power: float) -> float:
        return _output_error(sample, moments.hessian, scales(power), recipe)

    least, best = min((error(step / _POWERS), step / _POWERS) for step in range(_POWERS + 1))
    around = [best + step / _POWERS for step in (-0.5, 0.5)]
    finer = [(error(power), power) for power in around if 0 <= power <= 1]
    return scales(min((least, best), *finer)[1])


def round_clipped(weight: Tensor, products: Tensor | None, recipe: Recipe) -> GroupedWeight:
    """The second half: a scaled weight [out, in] on grids that err least on the outputs.

    products: as clipped_grid takes them; None: no token had this input.
    """
    weights = grouped(weight, recipe.group_size)
    grid = (
        clipped_grid(weights, recipe.bits, products)
        if recipe.clip
        else whole_grid(weights, recipe.bits)
    )
    return round_to(grid, weights)


def _output_error(weight: Tensor, hessian: Tensor, scales: Tensor, recipe: Recipe) -> float:
    """Σ ‖(Q(W s) / s - W) x‖², rounded as it will be in the end, but for the finer steps of
    clipping."""
    weights = grouped(weight * scales, recipe.group_size)
    size = weights.shape[-1]
    parts = scales.view(-1, size)
    products = _diagonal_blocks(hessian, size) / (parts[:, :, None] * parts[:, None, :])
    grid = _rough_grid(weights, products, recipe)
    # the Hessian stays as it is: it may be the largest of all
    difference = grid.nearest(weights).sub_(weights).flatten(1).div_(scales)
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))


def _rough_grid(weights: Tensor, products: Tensor, recipe: Recipe) -> Grid:
    if recipe.clip:
        return clipped_grid(weights, recipe.bits, products, coarse=True)
    return whole_grid(weights, recipe.bits)


def _diagonal_blocks(whole: Tensor, size: int) -> Tensor:
    """[in, in] to [in / size, size, size]."""
    count = len(whole) // size
    parts = whole.view(count, size, count, size)
    return parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
