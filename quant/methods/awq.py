"""AWQ (Lin et al. 2023): important channels are scaled up, then ranges are clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.quant.calibrate.input_stats import InputStats
from localgen.quant.calibrate.scaling import ScaleMapping
from localgen.quant.methods.grid import QuantGrid, clipped_grid, full_range_grid, split_groups
from localgen.quant.request.recipe import Recipe

# exponents to try: 0, 1 / 20, …, 1, then half a step to both sides of the best one
_NUM_POWERS = 20
_MIN_MAGNITUDE = 1e-8
# outputs of all readers that the error is computed of; fewer for wide inputs, because the cost of
# an output grows with their square
_SAMPLE_ROWS = 1024
_MIN_SAMPLE_ROWS = 256
_SAMPLE_WEIGHTS = 1 << 21


def search_awq_scales(
    mapping: ScaleMapping, weights: list[Tensor], stats: InputStats, recipe: Recipe
) -> Tensor:
    """Scales s of one input's channels with the smallest output error: float32 [in].

    weights: [out, in] of all readers. stats: of the input, with its Hessian. The error is
    Σ ‖(Q(W s) / s - W) x‖² over the calibration text, computed from the Hessian for a sample of the
    outputs. Candidates are powers of the mean magnitudes (equation 5 of the paper).
    """
    rows = min(_SAMPLE_ROWS, max(_MIN_SAMPLE_ROWS, _SAMPLE_WEIGHTS // weights[0].shape[1]))
    every = max(1, sum(map(len, weights)) // rows)
    sample = torch.cat([weight[::every] for weight in weights])
    magnitudes = mapping.average_repeats(stats.sum_abs / max(stats.num_tokens, 1)).clamp_min(
        _MIN_MAGNITUDE
    )

    def scales(power: float) -> Tensor:
        found = magnitudes**power
        # a common factor has no effect: center them at 1
        return found / (found.amax() * found.amin()).sqrt()

    def error(power: float) -> float:
        return _output_error(sample, stats.hessian, scales(power), recipe)

    least, best = min(
        (error(step / _NUM_POWERS), step / _NUM_POWERS) for step in range(_NUM_POWERS + 1)
    )
    around = [best + step / _NUM_POWERS for step in (-0.5, 0.5)]
    finer = [(error(power), power) for power in around if 0 <= power <= 1]
    return scales(min((least, best), *finer)[1])


def awq_grid(
    weights: Tensor, gram_blocks: Tensor | None, recipe: Recipe, *, coarse: bool = False
) -> QuantGrid:
    """The grid of scaled weights [out, groups, size] with the smallest output error.

    gram_blocks, coarse: as in clipped_grid; None if the linear got no tokens.
    """
    if recipe.clip:
        return clipped_grid(weights, recipe.bits, gram_blocks, coarse=coarse)
    return full_range_grid(weights, recipe.bits)


def scaled_blocks(gram_blocks: Tensor, scales: Tensor) -> Tensor:
    """Gram blocks [groups, size, size] of an input after division by scales [in]."""
    parts = scales.view(len(gram_blocks), -1)
    return gram_blocks / (parts[:, :, None] * parts[:, None, :])


def _output_error(weight: Tensor, hessian: Tensor, scales: Tensor, recipe: Recipe) -> float:
    """Σ ‖(Q(W s) / s - W) x‖², rounded with awq_grid but with coarse clipping."""
    weights = split_groups(weight * scales, recipe.group_size)
    blocks = scaled_blocks(_diagonal_blocks(hessian, weights.shape[-1]), scales)
    grid = awq_grid(weights, blocks, recipe, coarse=True)
    # the difference is scaled, not the Hessian, which may be the largest tensor
    difference = grid.fake_quantize(weights).sub_(weights).flatten(1).div_(scales)
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """[in / size, size, size] of a matrix [in, in]."""
    count = len(matrix) // size
    parts = matrix.view(count, size, count, size)
    return parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
