"""The parts of a run, in their order, and the calls that together cover all of them.

A unit is a part, or one side of it as PART/SIDE, and runs in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.gpu_parts import (
    ceilings,
    contexts,
    drafts,
    kernel_speed,
    peer,
    peers,
    smoke,
    startup,
    steps,
    workloads,
)
from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.decoder_checks import decoders
from benchmarks.gpu_parts.kernel_checks import GROUPS, kernels
from benchmarks.gpu_parts.kernel_speed import KernelBench
from benchmarks.gpu_parts.loaded_kernels import loaded_kernels
from benchmarks.gpu_parts.plan import GpuPlan
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import CorrectnessCheck, KernelTable, lost_unit
from benchmarks.gpu_parts.shapes import CHECKED, checked_like

Run = Callable[[GpuBench, Budget, str], None]
Sides = Callable[[GpuPlan], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Part:
    """run: measures one side. most_s: time of each side. sides: their names, or one empty name.

    at_once: sides that may run at the same time, because no time is measured.
    """

    run: Run
    most_s: float
    sides: Sides = lambda plan: ("",)
    at_once: int = 1

    def units(self, name: str, plan: GpuPlan) -> list[str]:
        """Names of the units of this part."""
        return [f"{name}/{side}" if side else name for side in self.sides(plan)]


def _models(plan: GpuPlan) -> list[str]:
    return [shape.name for shape in plan.models]


def _formats(plan: GpuPlan) -> list[str]:
    return [shape.name for shape in plan.formats]


def _checked_kinds(plan: GpuPlan) -> list[str]:
    """The small models on whose checks the modes depend."""
    return list(dict.fromkeys(checked_like(shape) for shape in plan.checked_shapes))


def _other_checks(plan: GpuPlan) -> list[str]:
    kinds = _checked_kinds(plan)
    return [*GROUPS, *(shape.name for shape in CHECKED if shape.name not in kinds)]


def _check(bench: GpuBench, budget: Budget, side: str) -> None:
    """Check a group of kernels, or a small model in every mode."""
    device, seed = bench.device, bench.report.seed
    if side in GROUPS:
        found = kernels(device, bench.plan.checked, seed, side)
    else:
        found = decoders(device, seed, next(shape for shape in CHECKED if shape.name == side))
    for check in found:
        bench.check(check)


def _ceilings(bench: GpuBench, budget: Budget, side: str) -> None:
    """Measure memory bandwidth and matrix throughput of the device."""
    plan = bench.plan
    ceilings.measure(bench.device, bench.report, size=plan.copy_bytes, side=plan.product_side)


def _kernels(bench: GpuBench, budget: Budget, side: str) -> None:
    """Compare kernels with torch's."""
    plan = bench.plan
    kernel_bench = KernelBench(bench.device, bench.ceilings, bench.report, bench.inputs)
    if side == kernel_speed.ATTENTION:
        kernel_speed.attention(kernel_bench, plan.plain.spec, plan.attention_batches, budget)
    elif side == kernel_speed.EXPERTS:
        kernel_speed.experts(kernel_bench, plan.experts, plan.expert_rows, budget)
    else:
        model = bench.model(plan.shape(side))
        kernel_speed.products(kernel_bench, model, plan.product_rows, budget)


def _step(bench: GpuBench, budget: Budget, side: str) -> None:
    """Profile decode steps and a prompt."""
    plan, shape, device = bench.plan, bench.plan.shape(side), bench.device
    each = plan.alone.prompt + steps.answer_tokens(plan.steps)
    kv_tokens = max(plan.step_batches) * each + 4 * plan.profiled_prompt
    with bench.session(shape, kv_tokens) as session:
        for batch in plan.step_batches:
            test = f"decoding × {batch}"
            if budget.fits(test):
                case_begins(f"{test}: {side}")
                prompts = bench.prompts(shape, [plan.alone.prompt] * batch)
                figures, times = steps.decode_step(device, session, prompts, steps=plan.steps)
                bench.report.add("step", test, side, [figures])
                bench.report.add_kernel_times(KernelTable(side, test, times))
        test = f"prompt of {plan.profiled_prompt:,}"
        if budget.fits(test):
            case_begins(f"{test}: {side}")
            prompts = bench.prompts(shape, [plan.profiled_prompt] * 3)
            figures, times = steps.prefill(device, session, prompts)
            bench.report.add("step", test, side, [figures])
            bench.report.add_kernel_times(KernelTable(side, test, times))


def _whole(run: Callable[[GpuBench, Budget], None]) -> Run:
    """A part without sides."""
    return lambda bench, budget, side: run(bench, budget)


PARTS: dict[str, Part] = {
    # first in every call: describes the device
    "device": Part(lambda bench, budget, side: smoke.smoke(bench), 15.0),
    "checks": Part(_check, 25.0, _other_checks, at_once=8),
    # after the checks: without the kernels that are wrong
    "modes": Part(_check, 35.0, _checked_kinds, at_once=8),
    "ceilings": Part(_ceilings, 10.0),
    "kernels": Part(_kernels, 16.0, lambda plan: [*_formats(plan), *kernel_speed.OTHERS]),
    "step": Part(_step, 25.0, _formats),
    "single": Part(workloads.single, 40.0, _models),
    "contexts": Part(_whole(contexts.contexts), 50.0),
    "mixture": Part(_whole(workloads.mixture), 35.0),
    "curve": Part(workloads.curve, 45.0, _formats),
    "load": Part(workloads.load, 60.0, _formats),
    "prefix": Part(_whole(workloads.prefix), 25.0),
    "chats": Part(_whole(workloads.chats), 30.0),
    "drafts": Part(_whole(drafts.drafts), 60.0),
    "startup": Part(_whole(startup.startup), 100.0),
    "large": Part(_whole(workloads.large), 60.0),
    "peers": Part(peers.compare, 90.0, lambda plan: (*peer.ALONE, *peer.BATCH)),
}
# each takes at most GpuPlan.call_s; each finds the modes and ceilings of the device it gets
CALLS: dict[str, tuple[str, ...]] = {
    "A": (
        *("device", "checks", "modes", "ceilings", "kernels", "step", "single"),
        *("contexts", "mixture"),
    ),
    "B": ("device", "modes", "ceilings", "curve", "load", "prefix", "chats", "drafts"),
    "C": ("device", "modes", "ceilings", "startup", "large", "peers"),
}


def most_seconds(names: Sequence[str], plan: GpuPlan) -> float:
    """Total of these parts, or units given as PART/SIDE, if all of them use up their time."""
    total_s = 0.0
    for name in names:
        part_name, _, side = name.partition("/")
        part = PARTS[part_name]
        total_s += part.most_s * (1 if side else -(-len(part.sides(plan)) // part.at_once))
    return total_s


def run_unit(unit: str, bench: GpuBench, seconds: float) -> None:
    """Run a unit in this process. Exceptions become a failed check."""
    name, _, side = unit.partition("/")
    budget = Budget(unit, time.monotonic() + seconds, bench.report.cut)
    clocks = bench.device.clocks()
    try:
        PARTS[name].run(bench, budget, side)
    except Exception as error:
        bench.check(CorrectnessCheck.raised(lost_unit(unit), error))
    bench.report.clocks[unit] = [clocks, bench.device.clocks()]
    bench.report.kernels |= loaded_kernels()
    bench.report.save()
