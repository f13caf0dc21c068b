"""State of the process of one part: device, plan, report, loaded models."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from benchmarks.gpu_parts.ceilings import Ceilings
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.inputs import Inputs
from benchmarks.gpu_parts.loaded import DTYPE, Loaded, WatchedRunner, engine_session, watched_runner
from benchmarks.gpu_parts.modes import DEPENDENT_MODE, best_mode, kernels_without, wrong_operations
from benchmarks.gpu_parts.plan import GpuPlan
from benchmarks.gpu_parts.progress import case_begins, progress
from benchmarks.gpu_parts.report import CorrectnessCheck, Figures, GpuReport
from benchmarks.gpu_parts.shapes import Shape, checked_like
from benchmarks.session import Session
from localgen.backends.cuda.kernels.dependent_launch import supports_dependent_launch
from localgen.backends.cuda.kernels.dispatch import switch_off

Side = Callable[[], Figures]


class GpuBench:
    """State of one part. All random numbers except the weights derive from the report's seed.

    before: results of the parts before it, which give the ceilings, the mode of each model, and the
    kernels that are wrong, which are switched off in this process.
    """

    def __init__(
        self, device: Device, plan: GpuPlan, report: GpuReport, before: GpuReport | None = None
    ) -> None:
        self.device, self.plan, self.report = device, plan, report
        self.random = random.Random(report.seed)
        self.ceilings = Ceilings.of(before.rows if before else [], device)
        self._checks = before.checks if before else []
        self._without = wrong_operations(self._checks)
        switch_off(kernels_without(self._without))
        self._loaded: dict[str, Loaded] = {}

    @property
    def inputs(self) -> Inputs:
        generator = torch.Generator(self.device.torch).manual_seed(self.report.seed)
        return Inputs(generator, DTYPE)

    def model(self, shape: Shape) -> Loaded:
        """Model with random weights, created on first use. One with another cache shares them."""
        if shape.name not in self._loaded:
            same = (one.weights for one in self._loaded.values() if one.spec == shape.spec)
            loaded = self._loaded[shape.name] = Loaded(shape, self.device, next(same, None))
            self.report.models.append(
                {
                    "name": shape.name,
                    "params": shape.spec.num_params,
                    "bytes": loaded.weights.num_bytes,
                    "step_bytes": loaded.step_bytes,
                }
            )
        return self._loaded[shape.name]

    def runner(
        self, shape: Shape, kv_tokens: int, *, is_draft: bool = False, dependent: bool = False
    ) -> WatchedRunner:
        """Runner of a model in the best mode that passed its checks, which the report names.

        kv_tokens: fewer if the device's memory holds fewer, which the report names too.
        is_draft: of a draft model, which must not run ahead: the target decides what follows.
        dependent: with programmatic dependent launch.
        """
        loaded, chosen = self.model(shape), best_mode(checked_like(shape), self._checks)
        if not is_draft:
            without = "".join(f", without {name} kernels" for name in self._without)
            self.report.modes[shape.name] = chosen.name + without
        room = loaded.max_kv_tokens(self.device)
        if room is not None and room < kv_tokens:
            name = f"KV cache of {kv_tokens:,} tokens for {shape.name}"
            self.report.skipped.append((name, f"the memory holds {room:,}"))
            kv_tokens = room
        return watched_runner(
            *(loaded.spec, loaded.weights, self.device),
            kv_tokens=kv_tokens,
            graphs=chosen.mode.graphs,
            ahead=chosen.mode.ahead and not is_draft,
            dependent=dependent,
            dtype=loaded.cache_dtype,
        )

    def session(self, shape: Shape, kv_tokens: int) -> Session:
        """Engine with the loader's defaults; see `runner`."""
        return engine_session(self.runner(shape, kv_tokens), shape.spec.vocab_size)

    def dependent_session(
        self, shape: Shape, kv_tokens: int
    ) -> AbstractContextManager[Session | None]:
        """`session` with programmatic dependent launch; None if that is not to be measured.

        The device must have it, and the model must have passed its check.
        """
        name = f"{checked_like(shape)}: {DEPENDENT_MODE.check}"
        passed = any(check.name == name and check.passed for check in self._checks)
        if not (passed and supports_dependent_launch(self.model(shape).weights.embed)):
            return nullcontext()
        runner = self.runner(shape, kv_tokens, dependent=True)
        return engine_session(runner, shape.spec.vocab_size)

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
                case_begins(f"{test}: {name}")
                found[name].append(sides[name]())
        for name, rounds in found.items():
            row = self.report.add(part, test, name, rounds)
            progress(" | ".join(row.cells()))

    def check(self, check: CorrectnessCheck) -> None:
        """Add a check to the report; print it if it failed."""
        self.report.check(check)
        if not check.passed:
            progress(f"FAILED {check.line()}")
