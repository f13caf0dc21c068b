"""How long a layer takes to quantize, from a trial with one batch of the text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TypeVar

import torch
from torch import Tensor

from localgen.quant.calibrate.layer_forward import CalibrationLayer

Result = TypeVar("Result")
# steps of learned rounding in a trial
TRIAL_STEPS = 3
# batches beside the first, which has costs that occur once
_MORE_BATCHES = 2


def estimate_layer_s(
    read: Callable[[], CalibrationLayer],
    collect: Callable[[CalibrationLayer], object],
    compute: Callable[[CalibrationLayer], object],
    *,
    device: torch.device,
    num_batches: int,
    num_passes: int,
    num_steps: int,
) -> float:
    """Seconds to quantize a layer, from trials with the first batch of its inputs.

    collect: reads all batches, as `compute` does before it rounds. compute: quantizes the layer, in
    at most TRIAL_STEPS if its rounding is learned. num_passes: forward passes of all batches beside
    those of both. num_steps: of learned rounding.
    """
    now_s = partial(_now_s, device)

    def timed(action: Callable[[], Result]) -> tuple[Result, float]:
        started_s = now_s()
        return action(), now_s() - started_s

    layer, read_s = timed(read)
    hidden = next(iter(layer.inputs()), None)
    if hidden is None:
        return read_s + timed(lambda: compute(layer))[1]

    def run_forward() -> Tensor:
        return layer.forward.run(layer.index, layer.tensors, hidden)

    outputs, _ = timed(run_forward)  # warm-up
    _, pass_s = timed(run_forward)
    step_ends: list[float] = []

    def with_batches(count: int) -> CalibrationLayer:
        return replace(
            layer,
            inputs=lambda: repeat(hidden, count),
            original_inputs=lambda: repeat(hidden, count),
            original_outputs=lambda: repeat(outputs, count),
            on_learning_step=lambda: step_ends.append(now_s()),
        )

    _, few_s = timed(lambda: collect(with_batches(1)))
    _, more_s = timed(lambda: collect(with_batches(1 + _MORE_BATCHES)))
    _, once_s = timed(lambda: compute(with_batches(1)))
    batch_s = max(0.0, more_s - few_s) / _MORE_BATCHES
    seconds = read_s + once_s + (num_batches - 1) * batch_s + num_passes * num_batches * pass_s
    if tried_steps := max(0, len(step_ends) - 1):
        step_s = (step_ends[-1] - step_ends[0]) / tried_steps
        # the loss is measured before and after
        seconds += (num_steps - tried_steps) * step_s + 2 * (num_batches - 1) * pass_s
    return seconds


def _now_s(device: torch.device) -> float:
    """The time when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
