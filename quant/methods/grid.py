"""Grids of the values that grouped weights can take: rounding to them, and finding the best one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.quant.files.packing import GroupedWeight, is_symmetric

# smallest float16 number: scales are stored as float16
_MIN_SCALE = 2.0**-24
# fractions of a group's range to try for the least weight error, and for the least output error
_WEIGHT_SHRINKS = tuple(1.0 - step / 20 for step in range(11))
_OUTPUT_SHRINKS = tuple(1.0 - step / 40 for step in range(21))
_COARSE_SHRINKS = tuple(1.0 - step / 10 for step in range(6))
# fractions of the scale of a group's whole range to try with each zero point, then of the best one
_SCALE_SHARES = tuple(1.0 - step / 20 for step in range(15))
_FINER_SCALE_SHARES = (0.97, 0.985, 1.015, 1.03)
# with more bits the whole range is best
_MAX_SEARCHED_BITS = 4
# weights searched at a time, so that all copies stay in the processor's cache
_CHUNK_WEIGHTS = 1 << 18
_GPU_CHUNK_WEIGHTS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class QuantGrid:
    """(code - zero) * scale for codes below 2 ** bits.

    scales: in the dtype of the weights; values that float16 can hold, except for GGUF's types.
    zeros: integers from 0 to 2 ** bits - 1. Both broadcast against the weights: [out, groups, 1]
    for [out, groups, size].
    """

    scales: Tensor
    zeros: Tensor
    bits: int

    def quantize(self, weights: Tensor) -> Tensor:
        """Codes of the nearest values, in the dtype of the weights."""
        # in place: these are the largest tensors of a search
        found = torch.round(weights / self.scales)
        return found.add_(self.zeros).clamp_(0, 2**self.bits - 1)

    def fake_quantize(self, weights: Tensor) -> Tensor:
        """The nearest values."""
        return self.quantize(weights).sub_(self.zeros).mul_(self.scales)

    def with_codes(self, codes: Tensor) -> GroupedWeight:
        """The weight of codes [out, in] on this grid of shape [out, groups, 1]."""
        return GroupedWeight(
            codes=codes.to(torch.uint8),
            scales=self.scales.squeeze(-1).float(),
            zeros=self.zeros.squeeze(-1).to(torch.uint8),
            bits=self.bits,
        )

    def round(self, weights: Tensor) -> GroupedWeight:
        """Round weights [out, groups, size] to the nearest values."""
        return self.with_codes(self.quantize(weights).flatten(1))


def round_to_nearest(
    weight: Tensor, bits: int, group_size: int | None, *, clip: bool = True
) -> GroupedWeight:
    """RTN: round a weight [out, in] on the grids with the smallest weight error.

    clip: the grids may cover a part of a group's range.
    """
    weights = split_groups(weight, group_size)
    searched = clip and bits <= _MAX_SEARCHED_BITS
    grid = searched_grid(weights, bits) if searched else full_range_grid(weights, bits)
    return grid.round(weights)


def split_groups(weight: Tensor, group_size: int | None) -> Tensor:
    """[out, in] as [out, groups, group_size]; None for one group."""
    return weight.reshape(len(weight), -1, group_size or weight.shape[1])


def full_range_grid(weights: Tensor, bits: int) -> QuantGrid:
    """The grid over the whole range of each group that has the smallest weight error.

    weights: [out, groups, size]. The grid must contain 0, so its ends rarely match the range.
    Candidates: steps of (high - low) / (2 ** bits - 1), and the widest grids within the range for
    the zero points below and above the exact one; symmetric grids over the range, and over its
    longer side.
    """
    return _concat_grids(_search_full_range(rows, bits) for rows in _row_chunks(weights))


def searched_grid(weights: Tensor, bits: int) -> QuantGrid:
    """The grid with the smallest weight error, by a search over scales and zero points.

    weights: [out, groups, size]. The objective of NeUQI (Lin et al. 2025) with zero points that are
    integers: grids over the whole range, then fractions of its scale with the zero points around
    its own, then finer ones around the best scale.
    """
    return _concat_grids(_search_scale_and_zero(rows, bits) for rows in _row_chunks(weights))


def clipped_grid(
    weights: Tensor, bits: int, gram_blocks: Tensor | None = None, *, coarse: bool = False
) -> QuantGrid:
    """The grid over a part of each group's range that has the smallest error.

    weights: [out, groups, size]. Both ends shrink together, then each on its own. coarse: together
    only, in larger steps. gram_blocks: [groups, size, size], Σ x xᵀ of each group's inputs, to
    minimize the output error Σ (Δw · x)²; None to minimize the weight error Σ Δw².
    """
    return _concat_grids(
        _search_clipped_range(rows, bits, gram_blocks, coarse) for rows in _row_chunks(weights)
    )


def _row_chunks(weights: Tensor) -> tuple[Tensor, ...]:
    at_once = _CHUNK_WEIGHTS if weights.device.type == "cpu" else _GPU_CHUNK_WEIGHTS
    return torch.split(weights, max(1, at_once // weights[0].numel()))


def _concat_grids(grids: Iterable[QuantGrid]) -> QuantGrid:
    parts = list(grids)
    scales = torch.cat([part.scales for part in parts])
    return QuantGrid(scales, torch.cat([part.zeros for part in parts]), parts[0].bits)


def _search_full_range(weights: Tensor, bits: int) -> QuantGrid:
    return _best_full_range(weights, bits).grid


def _best_full_range(weights: Tensor, bits: int) -> _BestRange:
    low, high = _range_with_zero(weights)
    best = _BestRange(weights, bits, None)
    best.try_range(low, high)
    if is_symmetric(bits):
        most = torch.maximum(-low, high) * (1 - 2.0 ** (1 - bits))
        reaches_up = high > -low
        best.try_range(
            torch.where(reaches_up, torch.maximum(low, -most), low),
            torch.where(reaches_up, high, torch.minimum(high, most)),
        )
        return best
    top = 2**bits - 1
    below = torch.floor(-low * top / (high - low)).nan_to_num(0.0)
    for zero in (below.clamp(1, top - 1), (below + 1).clamp(1, top - 1)):
        scale = torch.minimum(-low / zero, high / (top - zero))
        best.try_range(-zero * scale, (top - zero) * scale)
    return best


def _search_scale_and_zero(weights: Tensor, bits: int) -> QuantGrid:
    low, high = _range_with_zero(weights)
    best, top = _best_full_range(weights, bits), 2**bits - 1
    whole = (high - low) / top
    middle = torch.round(-low / whole).nan_to_num(0.0)
    zeros = [(middle + step).clamp(0, top) for step in (-1, 0, 1)]
    for share in _SCALE_SHARES:
        for zero in zeros:
            best.try_range(-zero * whole * share, (top - zero) * whole * share)
    low, high = best.low, best.high
    for share in _FINER_SCALE_SHARES:
        best.try_range(low * share, high * share)
    return best.grid


def _search_clipped_range(
    weights: Tensor, bits: int, gram_blocks: Tensor | None, coarse: bool
) -> QuantGrid:
    low, high = _range_with_zero(weights)
    best = _BestRange(weights, bits, gram_blocks)
    fine = _WEIGHT_SHRINKS if gram_blocks is None else _OUTPUT_SHRINKS
    for share in _COARSE_SHRINKS if coarse else fine:
        best.try_range(low * share, high * share)
    if not coarse:
        for share in fine:
            best.try_range(low * share, best.high)
        for share in fine:
            best.try_range(best.low, high * share)
    return best.grid


def _range_with_zero(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of the last dimension and 0, [..., 1]."""
    low, high = weights.aminmax(dim=-1, keepdim=True)
    return low.clamp_max(0), high.clamp_min(0)


class _BestRange:
    """The range of each group with the smallest error so far: low, high, [out, groups, 1]."""

    def __init__(self, weights: Tensor, bits: int, gram_blocks: Tensor | None) -> None:
        self._weights, self._bits, self._gram_blocks = weights, bits, gram_blocks
        self.low = self.high = torch.zeros_like(weights[..., :1])
        self._min_error = torch.full_like(self.low, torch.inf)

    def try_range(self, low: Tensor, high: Tensor) -> None:
        values = _grid_from_range(low, high, self._bits).fake_quantize(self._weights)
        error = _error(values.sub_(self._weights), self._gram_blocks)
        better = error < self._min_error
        self._min_error = torch.where(better, error, self._min_error)
        self.low = torch.where(better, low, self.low)
        self.high = torch.where(better, high, self.high)

    @property
    def grid(self) -> QuantGrid:
        return _grid_from_range(self.low, self.high, self._bits)


def _grid_from_range(low: Tensor, high: Tensor, bits: int) -> QuantGrid:
    """The grid over a range from low (at most 0) to high (at least 0) that contains 0.

    A symmetric grid has one code more for negative numbers: its scale is negative where the range
    reaches further above 0, as in llama.cpp's Q4_0.
    """
    if is_symmetric(bits):
        middle = 2 ** (bits - 1)
        longer, shorter = torch.maximum(-low, high), torch.minimum(-low, high)
        scales = stored_scales(torch.maximum(longer / middle, shorter / (middle - 1)))
        signed = torch.where(high > -low, -scales, scales)
        return QuantGrid(signed, torch.full_like(signed, middle), bits)
    top = 2**bits - 1
    scales = stored_scales((high - low) / top)
    return QuantGrid(scales, torch.round(-low / scales).clamp_(0, top), bits)


def stored_scales(scales: Tensor) -> Tensor:
    """Scales rounded to float16, none of them to 0; 1 for 0."""
    sizes = torch.where(scales == 0, 1.0, scales.abs())
    kept = sizes.clamp(_MIN_SCALE, torch.finfo(torch.float16).max).half().to(scales.dtype)
    return torch.where(scales < 0, -kept, kept)


def _error(difference: Tensor, gram_blocks: Tensor | None) -> Tensor:
    """[out, groups, 1]."""
    if gram_blocks is None:
        return difference.square().sum(-1, keepdim=True)
    spread = torch.bmm(difference.transpose(0, 1), gram_blocks).transpose(0, 1)
    return (spread * difference).sum(-1, keepdim=True)
