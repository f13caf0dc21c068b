"""How long a layer takes to quantize, from a trial with one batch of the text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from localgen.quant.calibrate.layer_forward import CalibrationLayer

Result = TypeVar("Result")
# steps of learned rounding in a trial; the first one takes longer
TRIAL_STEPS = 2
# of the statistics, in addition to the first
_MORE_BATCHES = 2


def estimate_layer_s(
    read: Callable[[], CalibrationLayer],
    collect: Callable[[CalibrationLayer], object],
    compute: Callable[[CalibrationLayer], object],
    *,
    device: torch.device,
    num_windows: int,
    num_passes: int,
    num_steps: int,
) -> float:
    """Seconds to quantize a layer, extrapolated from trials with the first batch of its inputs.

    collect: the statistics that `compute` needs. compute: quantizes the layer, in at most
    TRIAL_STEPS if its rounding is learned. num_windows: of all batches. num_passes: further forward
    passes over all batches. num_steps: of learned rounding. Experts that the first batch does not
    reach count as less work than they are.
    """
    now_s = partial(_now_s, device)

    def timed(action: Callable[[], Result]) -> tuple[Result, float]:
        started_s = now_s()
        return action(), now_s() - started_s

    layer, read_s = timed(read)
    first = next(iter(layer.inputs()), None)
    if first is None:
        return read_s + timed(lambda: compute(layer))[1]

    def first_batch() -> Tensor:
        return next(iter(layer.inputs()))  # read again, as each batch is

    def run_forward() -> Tensor:
        return layer.forward.run(layer.index, layer.tensors, first_batch()).cpu()

    outputs = run_forward()
    step_ends: list[float] = []

    def with_batches(count: int) -> CalibrationLayer:
        return replace(
            layer,
            inputs=lambda: (first_batch() for _ in range(count)),
            original_inputs=lambda: (first_batch() for _ in range(count)),
            original_outputs=lambda: (outputs.to(device) for _ in range(count)),
            on_learning_step=lambda: step_ends.append(now_s()),
        )

    collect(with_batches(1))  # what runs first takes longer
    _, few_s = timed(lambda: collect(with_batches(1)))
    _, more_s = timed(lambda: collect(with_batches(1 + _MORE_BATCHES)))
    _, once_s = timed(lambda: compute(with_batches(1)))
    _, pass_s = timed(run_forward)
    num_batches = num_windows / len(first)
    batch_s = max(0.0, more_s - few_s) / _MORE_BATCHES
    seconds = read_s + once_s + (num_batches - 1) * batch_s + num_passes * num_batches * pass_s
    if tried_steps := max(0, len(step_ends) - 1):
        seconds += (num_steps - tried_steps) * (step_ends[-1] - step_ends[-2])
        seconds += 2 * (num_batches - 1) * pass_s  # the loss before and after
    return seconds


def _now_s(device: torch.device) -> float:
    """Time in seconds, after all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
