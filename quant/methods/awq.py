"""AWQ (Lin et al. 2023): channels that matter are scaled up, then ranges clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.quant.calibrate.input_stats import InputStats
from localgen.quant.calibrate.scaling import ScaleMapping
from localgen.quant.files.quantized_weight import GroupedWeight
from localgen.quant.methods.clipping import clipped_grid, full_range_grid
from localgen.quant.methods.grid import QuantGrid, split_groups
from localgen.quant.methods.rtn import round_to_grid
from localgen.quant.request.recipe import Recipe

# powers of the activations' magnitudes that are tried: 0, 1 / 20, …, 1, then half a step to both
# sides of the best one
_NUM_POWERS = 20
_MIN_MAGNITUDE = 1e-8
# outputs whose error decides, of all readers together: every n-th of more than that; of wide
# inputs fewer, for each costs their square
_SAMPLE_ROWS = 1024
_MIN_SAMPLE_ROWS = 256
_SAMPLE_WEIGHTS = 1 << 21


def search_awq_scales(
    mapping: ScaleMapping, weights: list[Tensor], stats: InputStats, recipe: Recipe
) -> Tensor:
    """The scales s of one input's channels whose rounded readers err least: float32 [in].

    weights: [out, in] of all readers. stats: of the input, with its Hessian. The error is that
    of the readers' outputs over the calibration text, Σ ‖(Q(W s) / s - W) x‖², which the Hessian
    tells without the text; of many outputs a share has to do. Tried are powers of the mean
    magnitudes (equation 5 of the paper).
    """
    rows = min(_SAMPLE_ROWS, max(_MIN_SAMPLE_ROWS, _SAMPLE_WEIGHTS // weights[0].shape[1]))
    every = max(1, sum(map(len, weights)) // rows)
    sample = torch.cat([weight[::every] for weight in weights])
    magnitudes = mapping.average_repeats(stats.sum_abs / max(stats.num_tokens, 1)).clamp_min(
        _MIN_MAGNITUDE
    )

    def scales(power: float) -> Tensor:
        found = magnitudes**power
        # how large they are as a whole is free: their middle goes to 1
        return found / (found.amax() * found.amin()).sqrt()

    def error(power: float) -> float:
        return _output_error(sample, stats.hessian, scales(power), recipe)

    least, best = min(
        (error(step / _NUM_POWERS), step / _NUM_POWERS) for step in range(_NUM_POWERS + 1)
    )
    around = [best + step / _NUM_POWERS for step in (-0.5, 0.5)]
    finer = [(error(power), power) for power in around if 0 <= power <= 1]
    return scales(min((least, best), *finer)[1])


def round_awq(weight: Tensor, gram_blocks: Tensor | None, recipe: Recipe) -> GroupedWeight:
    """The second half: a scaled weight [out, in] on grids that err least on the outputs.

    gram_blocks: as clipped_grid takes them; None: no token had this input.
    """
    weights = split_groups(weight, recipe.group_size)
    grid = (
        clipped_grid(weights, recipe.bits, gram_blocks)
        if recipe.clip
        else full_range_grid(weights, recipe.bits)
    )
    return round_to_grid(grid, weights)


def _output_error(weight: Tensor, hessian: Tensor, scales: Tensor, recipe: Recipe) -> float:
    """Σ ‖(Q(W s) / s - W) x‖², rounded as it will be in the end, but for the finer steps of
    clipping."""
    weights = split_groups(weight * scales, recipe.group_size)
    size = weights.shape[-1]
    parts = scales.view(-1, size)
    products = _diagonal_blocks(hessian, size) / (parts[:, :, None] * parts[:, None, :])
    grid = _coarse_grid(weights, products, recipe)
    # the Hessian stays as it is: it may be the largest of all
    difference = grid.fake_quantize(weights).sub_(weights).flatten(1).div_(scales)
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))


def _coarse_grid(weights: Tensor, gram_blocks: Tensor, recipe: Recipe) -> QuantGrid:
    if recipe.clip:
        return clipped_grid(weights, recipe.bits, gram_blocks, coarse=True)
    return full_range_grid(weights, recipe.bits)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """[in, in] to [in / size, size, size]."""
    count = len(matrix) // size
    parts = matrix.view(count, size, count, size)
    return parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
