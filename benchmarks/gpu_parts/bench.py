"""What the parts of a run share: device, plan, report, and models that stay loaded."""

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
from benchmarks.gpu_parts.plan import Plan
from benchmarks.gpu_parts.report import Check, Figures, Report
from benchmarks.gpu_parts.shapes import Shape

Side = Callable[[], Figures]


class Bench:
    """One run. seed: of every random number in it, but the weights'."""

    def __init__(self, device: Device, plan: Plan, report: Report) -> None:
        self.device, self.plan, self.report = device, plan, report
        self.random = random.Random(report.seed)
        self._loaded: dict[str, Loaded] = {}
        self._ceilings: Ceilings | None = None
        self._begun_s = time.monotonic()

    def peers_ready_s(self) -> float:
        """Seconds that peers still have to get ready, since the run began."""
        return self._begun_s + self.plan.peer_ready_s - time.monotonic()

    @property
    def ceilings(self) -> Ceilings:
        """Measured when first asked for."""
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
        """Its weights, made once."""
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
        """Give its memory back."""
        self._loaded.pop(shape.name, None)
        self.device.free()

    def prompt(self, shape: Shape, tokens: int) -> list[int]:
        """Random tokens, never the same twice, so that no cache helps."""
        return self.random.choices(range(shape.spec.vocab_size), k=tokens)

    def prompts(self, shape: Shape, lengths: Sequence[int]) -> list[list[int]]:
        return [self.prompt(shape, tokens) for tokens in lengths]

    def rounds(
        self, part: str, test: str, sides: Mapping[str, Side], wanted: int, budget: Budget
    ) -> None:
        """Run every side once a round, in alternating order, and enter what was found."""
        found: dict[str, list[Figures]] = {name: [] for name in sides}
        for number in budget.rounds(wanted, test):
            for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                found[name].append(sides[name]())
        for name, rounds in found.items():
            row = self.report.add(part, test, name, rounds)
            progress(" | ".join(row.cells()))

    def check(self, check: Check) -> None:
        """Enter a check, and say so if it failed."""
        self.report.checks.append(check)
        if not check.passed:
            progress(f"FAILED {check.line()}")


def progress(line: str) -> None:
    """What happens, for who waits."""
    print(f"  {line}", file=sys.stderr, flush=True)
