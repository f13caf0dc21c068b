"""Check and measure localgen on a GPU: kernels, workloads, hardware limits and other engines.

python -m benchmarks.gpu [--quick] [--only PART,...] [--output FILE]
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu_parts import drafts, kernel_speed, startup, steps, workloads
from benchmarks.gpu_parts.bench import GpuBench, progress
from benchmarks.gpu_parts.clock import Budget, Clock
from benchmarks.gpu_parts.decoder_checks import decoders
from benchmarks.gpu_parts.device import Device, versions
from benchmarks.gpu_parts.kernel_checks import kernels
from benchmarks.gpu_parts.kernel_speed import KernelBench
from benchmarks.gpu_parts.loaded import serving
from benchmarks.gpu_parts.peers import Peers, compare
from benchmarks.gpu_parts.plan import FULL, QUICK
from benchmarks.gpu_parts.report import CorrectnessCheck, GpuReport, format_error
from benchmarks.measure import command

RESULTS = Path(__file__).parent / "results"


def checks(bench: GpuBench, budget: Budget) -> None:
    """Check the results of kernels and decoder."""
    seed = bench.report.seed
    for check in kernels(bench.device, bench.plan.checked, seed):
        bench.check(check)
    bench.device.free()
    for check in decoders(bench.device, seed):
        bench.check(check)
    bench.device.free()


def ceilings(bench: GpuBench, budget: Budget) -> None:
    """Measure memory bandwidth and matrix throughput of the device."""
    assert bench.ceilings


def step(bench: GpuBench, budget: Budget) -> None:
    """Profile decode steps."""
    plan, shape = bench.plan, bench.plan.plain
    for batch in plan.step_batches:
        if not budget.fits(f"{batch} sequences"):
            continue
        kv_tokens = batch * (plan.alone.prompt + 1024) + 4096
        with serving(bench.model(shape), bench.device, kv_tokens=kv_tokens) as session:
            prompts = bench.prompts(shape, [plan.alone.prompt] * batch)
            found = steps.measured(bench.device, session, prompts, steps=plan.steps)
        bench.report.add("step", f"decoding × {batch}", shape.name, [found])


def products(bench: GpuBench, budget: Budget) -> None:
    """Compare kernels with torch's."""
    plan = bench.plan
    kernel_bench = KernelBench(bench.device, bench.ceilings, bench.report, bench.inputs)
    models = [bench.model(shape) for shape in (plan.plain, plan.int4, plan.fp8)]
    kernel_speed.products(kernel_bench, models, plan.product_rows, budget)
    kernel_speed.attention(kernel_bench, plan.plain.spec, plan.attention_batches, budget)


Part = Callable[[GpuBench, Budget], None]
# in order of importance, with the maximum seconds of each
PARTS: dict[str, tuple[Part, float]] = {
    "checks": (checks, 130.0),
    "peers": (lambda bench, budget: None, 75.0),  # replaced in _run once the peers are started
    "ceilings": (ceilings, 10.0),
    "single": (workloads.single, 80.0),
    "step": (step, 25.0),
    "curve": (workloads.curve, 75.0),
    "load": (workloads.load, 75.0),
    "kernels": (products, 35.0),
    "prefix": (workloads.prefix, 15.0),
    "chats": (workloads.chats, 20.0),
    "startup": (startup.startup, 70.0),
    "drafts": (drafts.drafts, 40.0),
    "large": (workloads.large, 30.0),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a check or a part failed, 2 without a GPU."""
    options = _options(arguments)
    plan = QUICK if options.quick else FULL
    device = Device.found(gpu=not options.quick)
    if not options.quick and not device.is_gpu:
        print("error: torch finds no GPU: --quick runs on a CPU", file=sys.stderr)
        return 2
    clock = Clock(plan.total_s)
    report = GpuReport(
        quick=options.quick,
        seed=secrets.randbits(31) if options.seed is None else options.seed,
        machine=device.describe(),
        versions=versions(),
        commands=[command("benchmarks.gpu", arguments)],
        cut=clock.cut,
    )
    target = options.output or RESULTS / _file_name(device)
    _run(GpuBench(device, plan, report), options.only, clock, target)
    print(report.text())
    print(f"written to {target}", file=sys.stderr)
    return 1 if report.failed else 0


def _run(bench: GpuBench, only: tuple[str, ...], clock: Clock, target: Path) -> None:
    with ExitStack() as stack:
        parts = {name: PARTS[name] for name in PARTS if name in only}
        if "peers" in parts:
            # peers load and compile while localgen is checked
            peers = stack.enter_context(Peers(quick=bench.report.quick))

            def others(bench: GpuBench, budget: Budget) -> None:
                compare(bench, peers, budget)
                peers.close()

            parts["peers"] = (others, PARTS["peers"][1])
        for name, (part, most_s) in parts.items():
            budget = clock.part(name, most_s)
            if budget is not None:
                _one(bench, name, part, budget)
                # keep the results so far if a later part crashes
                bench.report.write(target)


def _one(bench: GpuBench, name: str, part: Part, budget: Budget) -> None:
    progress(f"{name} …")
    begun_s = time.monotonic()
    try:
        part(bench, budget)
    except Exception as error:  # run the other parts
        bench.check(CorrectnessCheck(f"part {name}", 0.0, 0.0, format_error(error)))
    bench.report.part_s[name] = time.monotonic() - begun_s
    bench.device.free()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.gpu")
    parser.add_argument("--quick", action="store_true", help="toy sizes, on a CPU")
    parser.add_argument("--only", type=_parts, default=tuple(PARTS), help=", ".join(PARTS))
    parser.add_argument("--seed", type=int, help="seed of the random inputs (default: random)")
    parser.add_argument("--output", type=Path, help="result file; a Markdown table is also written")
    return parser.parse_args(arguments)


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}, only {', '.join(PARTS)}")
    return names


def _file_name(device: Device) -> str:
    name = "-".join(device.name.lower().removeprefix("nvidia").split())
    return f"gpu-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


if __name__ == "__main__":
    sys.exit(main())
