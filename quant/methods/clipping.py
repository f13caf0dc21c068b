"""Which range of a group of weights is best rounded to few values: all of it, or a part."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.quant.methods.grid import Grid, range_grid, span, stacked

# shares of a group's range that are tried
_FINE = tuple(1.0 - step / 20 for step in range(11))
_COARSE = tuple(1.0 - step / 10 for step in range(6))
# weights that are searched at a time, so that all copies stay in the processor's cache
_AT_ONCE = 1 << 18
_AT_ONCE_ON_GPU = 1 << 24


def whole_grid(weights: Tensor, bits: int) -> Grid:
    """The grid over each group's whole range that is nearest to its weights.

    weights: [out, groups, size]. As 0 must be on the grid, its ends seldom meet those of the
    range. Tried are steps of (high - low) / (2 ** bits - 1), and the widest grids that end
    within the range, for the zero before and after where it would be.
    """
    return stacked(_whole(rows, bits) for rows in _few_rows(weights))


def clipped_grid(
    weights: Tensor, bits: int, products: Tensor | None = None, *, coarse: bool = False
) -> Grid:
    """The grid over a part of each group's range that has the least error.

    weights: [out, groups, size]. Both ends shrink together first, then each by itself; coarse:
    together only, in larger steps. products: [groups, size, size], Σ x xᵀ of each group's
    inputs: the error is that of the outputs, Σ (Δw · x)². None: that of the weights, Σ Δw².
    """
    return stacked(_clipped(rows, bits, products, coarse) for rows in _few_rows(weights))


def _few_rows(weights: Tensor) -> tuple[Tensor, ...]:
    at_once = _AT_ONCE if weights.device.type == "cpu" else _AT_ONCE_ON_GPU
    return torch.split(weights, max(1, at_once // weights[0].numel()))


def _whole(weights: Tensor, bits: int) -> Grid:
    low, high = span(weights)
    best = _Best(weights, bits, None)
    best.offer(low, high)
    top = 2**bits - 1
    before = torch.floor(-low * top / (high - low)).nan_to_num(0.0)
    for zero in (before.clamp(1, top - 1), (before + 1).clamp(1, top - 1)):
        scale = torch.minimum(-low / zero, high / (top - zero))
        best.offer(-zero * scale, (top - zero) * scale)
    return best.grid


def _clipped(weights: Tensor, bits: int, products: Tensor | None, coarse: bool) -> Grid:
    low, high = span(weights)
    best = _Best(weights, bits, products)
    for share in _COARSE if coarse else _FINE:
        best.offer(low * share, high * share)
    if not coarse:
        for share in _FINE:
            best.offer(low * share, best.high)
        for share in _FINE:
            best.offer(best.low, high * share)
    return best.grid


class _Best:
    """The range with the least error so far, of each group: low, high, [out, groups, 1]."""

    def __init__(self, weights: Tensor, bits: int, products: Tensor | None) -> None:
        self._weights, self._bits, self._products = weights, bits, products
        self.low = self.high = torch.zeros_like(weights[..., :1])
        self._least = torch.full_like(self.low, torch.inf)

    def offer(self, low: Tensor, high: Tensor) -> None:
        values = range_grid(low, high, self._bits).nearest(self._weights)
        error = _error(values.sub_(self._weights), self._products)
        better = error < self._least
        self._least = torch.where(better, error, self._least)
        self.low = torch.where(better, low, self.low)
        self.high = torch.where(better, high, self.high)

    @property
    def grid(self) -> Grid:
        return range_grid(self.low, self.high, self._bits)


def _error(difference: Tensor, products: Tensor | None) -> Tensor:
    """[out, groups, 1]."""
    if products is None:
        return difference.square().sum(-1, keepdim=True)
    spread = torch.bmm(difference.transpose(0, 1), products).transpose(0, 1)
    return (spread * difference).sum(-1, keepdim=True)
