"""Which range of a group of weights is best rounded to few values: all of it, or a part."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.quant.methods.grid import QuantGrid, concat_grids, grid_from_range, range_with_zero

# shares of a group's range that are tried
_FINE_SHRINKS = tuple(1.0 - step / 20 for step in range(11))
_COARSE_SHRINKS = tuple(1.0 - step / 10 for step in range(6))
# weights that are searched at a time, so that all copies stay in the processor's cache
_CHUNK_WEIGHTS = 1 << 18
_GPU_CHUNK_WEIGHTS = 1 << 24


def full_range_grid(weights: Tensor, bits: int) -> QuantGrid:
    """The grid over each group's whole range that is nearest to its weights.

    weights: [out, groups, size]. As 0 must be on the grid, its ends seldom meet those of the
    range. Tried are steps of (high - low) / (2 ** bits - 1), and the widest grids that end
    within the range, for the zero before and after where it would be.
    """
    return concat_grids(_search_full_range(rows, bits) for rows in _row_chunks(weights))


def clipped_grid(
    weights: Tensor, bits: int, gram_blocks: Tensor | None = None, *, coarse: bool = False
) -> QuantGrid:
    """The grid over a part of each group's range that has the least error.

    weights: [out, groups, size]. Both ends shrink together first, then each by itself; coarse:
    together only, in larger steps. gram_blocks: [groups, size, size], Σ x xᵀ of each group's
    inputs: the error is that of the outputs, Σ (Δw · x)². None: that of the weights, Σ Δw².
    """
    return concat_grids(
        _search_clipped_range(rows, bits, gram_blocks, coarse) for rows in _row_chunks(weights)
    )


def _row_chunks(weights: Tensor) -> tuple[Tensor, ...]:
    at_once = _CHUNK_WEIGHTS if weights.device.type == "cpu" else _GPU_CHUNK_WEIGHTS
    return torch.split(weights, max(1, at_once // weights[0].numel()))


def _search_full_range(weights: Tensor, bits: int) -> QuantGrid:
    low, high = range_with_zero(weights)
    best = _BestRange(weights, bits, None)
    best.try_range(low, high)
    top = 2**bits - 1
    before = torch.floor(-low * top / (high - low)).nan_to_num(0.0)
    for zero in (before.clamp(1, top - 1), (before + 1).clamp(1, top - 1)):
        scale = torch.minimum(-low / zero, high / (top - zero))
        best.try_range(-zero * scale, (top - zero) * scale)
    return best.grid


def _search_clipped_range(
    weights: Tensor, bits: int, gram_blocks: Tensor | None, coarse: bool
) -> QuantGrid:
    low, high = range_with_zero(weights)
    best = _BestRange(weights, bits, gram_blocks)
    for share in _COARSE_SHRINKS if coarse else _FINE_SHRINKS:
        best.try_range(low * share, high * share)
    if not coarse:
        for share in _FINE_SHRINKS:
            best.try_range(low * share, best.high)
        for share in _FINE_SHRINKS:
            best.try_range(best.low, high * share)
    return best.grid


class _BestRange:
    """The range with the least error so far, of each group: low, high, [out, groups, 1]."""

    def __init__(self, weights: Tensor, bits: int, gram_blocks: Tensor | None) -> None:
        self._weights, self._bits, self._products = weights, bits, gram_blocks
        self.low = self.high = torch.zeros_like(weights[..., :1])
        self._min_error = torch.full_like(self.low, torch.inf)

    def try_range(self, low: Tensor, high: Tensor) -> None:
        values = grid_from_range(low, high, self._bits).fake_quantize(self._weights)
        error = _error(values.sub_(self._weights), self._products)
        better = error < self._min_error
        self._min_error = torch.where(better, error, self._min_error)
        self.low = torch.where(better, low, self.low)
        self.high = torch.where(better, high, self.high)

    @property
    def grid(self) -> QuantGrid:
        return grid_from_range(self.low, self.high, self._bits)


def _error(difference: Tensor, gram_blocks: Tensor | None) -> Tensor:
    """[out, groups, 1]."""
    if gram_blocks is None:
        return difference.square().sum(-1, keepdim=True)
    spread = torch.bmm(difference.transpose(0, 1), gram_blocks).transpose(0, 1)
    return (spread * difference).sum(-1, keepdim=True)
