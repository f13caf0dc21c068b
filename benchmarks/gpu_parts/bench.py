"""State shared by the parts of a run: device, plan, report, loaded models."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.gpu_parts import ceilings
from benchmarks.gpu_parts.ceilings import Ceilings
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.inputs import Inputs
from benchmarks.gpu_parts.loaded import DTYPE, Loaded
from benchmarks.gpu_parts.plan import GpuPlan
from benchmarks.gpu_parts.report import CorrectnessCheck, Figures, GpuReport
from benchmarks.gpu_parts.shapes import Shape

Side = Callable[[], Figures]


class GpuBench:
    """State of one run. All random numbers except the weights derive from the report's seed."""

    def __init__(self, device: Device, plan: GpuPlan, report: GpuReport) -> None:
        self.device, self.plan, self.report = device, plan, report
        self.random = random.Random(report.seed)
        self._loaded: dict[str, Loaded] = {}
        self._ceilings: Ceilings | None = None
        self._begun_s = time.monotonic()

    def peers_ready_s(self) -> float:
        """Seconds until all peers must be ready; negative after that."""
        return self._begun_s + self.plan.peer_ready_s - time.monotonic()

    @property
    def ceilings(self) -> Ceilings:
        """Ceilings of the device, measured on first use."""
        if self._ceilings is None:
            self._ceilings = ceilings.measure(
                *(self.device, self.report),
                size=self.plan.copy_bytes,
                side=self.plan.product_side,
            )
            self.device.free()
        return self._ceilings

    @property
    def inputs(self) -> Inputs:
        generator = torch.Generator(self.device.torch).manual_seed(self.report.seed)
        return Inputs(generator, DTYPE)

    def model(self, shape: Shape) -> Loaded:
        """Model with random weights, created on first use."""
        if shape.name not in self._loaded:
            loaded = self._loaded[shape.name] = Loaded(shape, self.device)
            self.report.models.append(
                {
                    "name": shape.name,
                    "params": shape.spec.num_params,
                    "bytes": loaded.weights.num_bytes,
                    "step_bytes": loaded.step_bytes,
                }
            )
        return self._loaded[shape.name]

    def drop(self, shape: Shape) -> None:
        """Free the model's memory."""
        self._loaded.pop(shape.name, None)
        self.device.free()

    def prompt(self, shape: Shape, tokens: int) -> list[int]:
        """Return a new random prompt, which no cached prefix matches."""
        return self.random.choices(range(shape.spec.vocab_size), k=tokens)

    def prompts(self, shape: Shape, lengths: Sequence[int]) -> list[list[int]]:
        return [self.prompt(shape, tokens) for tokens in lengths]

    def rounds(
        self, part: str, test: str, sides: Mapping[str, Side], wanted: int, budget: Budget
    ) -> None:
        """Run every side once per round, in alternating order, and add the results."""
        found: dict[str, list[Figures]] = {name: [] for name in sides}
        for number in budget.rounds(wanted, test):
            for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                found[name].append(sides[name]())
        for name, rounds in found.items():
            row = self.report.add(part, test, name, rounds)
            progress(" | ".join(row.cells()))

    def check(self, check: CorrectnessCheck) -> None:
        """Add a check to the report; print it if it failed."""
        self.report.checks.append(check)
        if not check.passed:
            progress(f"FAILED {check.line()}")


def progress(line: str) -> None:
    """Print a progress line."""
    print(f"  {line}", file=sys.stderr, flush=True)
