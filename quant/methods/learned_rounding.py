"""Rounding learned from the output of a whole layer, by the signs of gradients.

SignRound (Cheng et al. 2023, the method of AutoRound): each weight is moved by up to half a step
before it is rounded. Both ends of a group's range are scaled as well, but not in GGUF files. The
loss is the mean squared difference of the layer's output from the original layer's. It starts where
another method ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from localgen.quant.calibrate.layer_forward import CalibrationLayer
from localgen.quant.files.packing import GroupedWeight, QuantizedWeight, is_symmetric
from localgen.quant.methods.grid import QuantGrid, split_groups, stored_scales

# a weight is never moved past the next value of its grid
MAX_OFFSET = 0.5
# ends of a group's range, relative to those at the start
_MIN_END, _MAX_END = 0.5, 1.2


class LearnedWeight(Protocol):
    """A linear's weight whose rounding is learned. It begins where another method ended."""

    def values(self) -> Tensor:
        """The rounded weight, float32 [out, in]."""
        ...

    def step(self, gradient: Tensor, rate: float) -> None:
        """Move all parameters by `rate` against the signs of their gradients, which follow from
        the gradient of the values, [out, in]."""
        ...

    def round(self) -> QuantizedWeight:
        """The rounded weight as it is stored."""
        ...


def learn_rounding(
    layer: CalibrationLayer, learned: Mapping[str, LearnedWeight], steps: int
) -> dict[str, QuantizedWeight]:
    """Rounded weights of all linears in `learned`, by name.

    Each step reads one batch of the inputs; the learning rate falls linearly from 1 / steps to 0.
    The start is kept if the result has no lower loss over all inputs. layer: its tensors are those
    outside of `learned`, and original_outputs is needed.
    """
    at_start = {name: one.round() for name, one in learned.items()}
    first_loss = _mean_loss(layer, at_start)
    layer.on_learning_step()
    for step, (hidden, target) in zip(range(steps), _repeated_batches(layer), strict=False):
        _take_step(layer, learned, hidden, target, (1 - step / steps) / steps)
        layer.on_learning_step()
    found = {name: one.round() for name, one in learned.items()}
    return found if _mean_loss(layer, found) < first_loss else at_start


def _batches(layer: CalibrationLayer) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs of the layer, and outputs of the original layer for the same tokens."""
    assert layer.original_outputs is not None
    return zip(layer.inputs(), layer.original_outputs(), strict=True)


def _repeated_batches(layer: CalibrationLayer) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from _batches(layer)


def _mean_loss(layer: CalibrationLayer, weights: Mapping[str, QuantizedWeight]) -> float:
    values = {f"{name}.weight": weight.dequantize() for name, weight in weights.items()}
    losses = [
        float(
            (layer.forward.run(layer.index, layer.tensors | values, hidden) - target)
            .square()
            .mean()
        )
        for hidden, target in _batches(layer)
    ]
    return sum(losses) / len(losses)


def _take_step(
    layer: CalibrationLayer,
    learned: Mapping[str, LearnedWeight],
    hidden: Tensor,
    target: Tensor,
    rate: float,
) -> None:
    values = {f"{name}.weight": one.values().requires_grad_() for name, one in learned.items()}
    with torch.enable_grad():
        output = layer.forward.run_differentiable(layer.index, layer.tensors | values, hidden)
        loss = (output - target).square().mean()
        # an expert without tokens has no gradient
        gradients = torch.autograd.grad(loss, list(values.values()), allow_unused=True)
    for one, gradient in zip(learned.values(), gradients, strict=True):
        if gradient is not None:
            one.step(gradient, rate)


class LearnedGroups:
    """Offsets of a weight's elements before rounding, in steps of the grid, and factors of its
    groups' ranges: [out, groups, size] and [out, groups, 1]."""

    def __init__(self, weight: Tensor, grid: QuantGrid) -> None:
        """weight: float32 [out, in], whose nearest values on the grid [out, groups, 1] are the
        start."""
        groups = grid.scales.shape[1]
        self._weights = split_groups(weight, weight.shape[1] // groups)
        self._start = grid
        self._offsets = torch.zeros_like(self._weights)
        self._low, self._high = (torch.ones_like(grid.scales) for _ in range(2))

    def values(self) -> Tensor:
        return self._rounded(self._offsets, self._low, self._high)

    def step(self, gradient: Tensor, rate: float) -> None:
        parameters = (self._offsets, self._low, self._high)
        # the graph of one linear at a time, not of the whole layer
        leaves = [each.clone().requires_grad_() for each in parameters]
        with torch.enable_grad():
            rounded = self._rounded(*leaves)
            found = torch.autograd.grad(rounded, leaves, gradient)
        for parameter, each in zip(parameters, found, strict=True):
            parameter.sub_(each.sign_(), alpha=rate)
        self._offsets.clamp_(-MAX_OFFSET, MAX_OFFSET)
        self._low.clamp_(_MIN_END, _MAX_END)
        self._high.clamp_(_MIN_END, _MAX_END)

    def round(self) -> GroupedWeight:
        grid = self._grid(self._low, self._high)
        return grid.with_codes(self._codes(grid, self._offsets).flatten(1))

    def _rounded(self, offsets: Tensor, low: Tensor, high: Tensor) -> Tensor:
        grid = self._grid(low, high)
        return (self._codes(grid, offsets) - grid.zeros).mul(grid.scales).flatten(1)

    def _codes(self, grid: QuantGrid, offsets: Tensor) -> Tensor:
        moved = _straight_through(self._weights / grid.scales + offsets, torch.round)
        return (moved + grid.zeros).clamp(0, 2**grid.bits - 1)

    def _grid(self, low: Tensor, high: Tensor) -> QuantGrid:
        """The grid with its range's ends scaled; a symmetric one by the mean of both factors."""
        bits, start = self._start.bits, self._start
        if is_symmetric(bits):
            scales = start.scales * (low + high) / 2
            return QuantGrid(_straight_through(scales, stored_scales), start.zeros, bits)
        top = 2**bits - 1
        below, above = start.zeros * low, (top - start.zeros) * high
        scales = _straight_through(start.scales * (below + above) / top, stored_scales)
        exact = below * start.scales / scales
        return QuantGrid(scales, _straight_through(exact, torch.round).clamp(0, top), bits)


def _straight_through(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """change(x), with the gradient of x."""
    return x + (change(x) - x).detach()
