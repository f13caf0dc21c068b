"""CUDA graphs on the CPU: a replay computes again, on the buffers of its capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
from torch import Tensor

from localgen.backends.cuda.model.batch import StepInputs
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor, TokenSource
from localgen.backends.cuda.steps.graph_capture import Replay


class FakeCapture:
    """Stands in for GraphCapture.

    error: raised by every capture. errors: raised by the first captures in turn; None: none is.
    """

    def __init__(
        self, error: Exception | None = None, errors: Iterable[Exception | None] = ()
    ) -> None:
        self.error = error
        self._errors: Iterator[Exception | None] = iter(errors)
        self.captures = self.replays = 0

    def __call__(self, forward: Callable[[], object]) -> Replay:
        self.captures += 1
        error = next(self._errors, self.error)
        if error is not None:
            raise error

        def replay() -> None:
            self.replays += 1
            forward()

        return replay


def capture_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each step capture what the steps before it lacked, as happens while no request runs."""
    run = DeviceExecutor.run

    def capture_and_run(
        executor: DeviceExecutor, inputs: StepInputs, token_source: TokenSource | None = None
    ) -> Tensor:
        executor.capture_next()
        return run(executor, inputs, token_source)

    monkeypatch.setattr(DeviceExecutor, "run", capture_and_run)
