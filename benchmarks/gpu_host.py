"""The processor's part of a step of the CUDA backend, without a GPU.

    python -m benchmarks.gpu_host [--quick] [--rounds N] [--only steps eager] [--against CHECKOUT]

steps: engine, scheduler, runner, run-ahead, step inputs, sampling parameters and output are real,
as is the executor of CUDA graphs. Graphs, kernels and copies to the host do nothing.
eager: a forward pass without CUDA graphs, whose kernels are compiled and launched by Triton with a
driver that does nothing.

Times are processor time of the engine's thread. With --against, another checkout of localgen is
measured in turn, by this benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_parts.host_eager import EagerForward
from benchmarks.gpu_parts.host_steps import HostSteps
from benchmarks.measure import ModelLine, Report, command

# sequences, and the targets of a step's processor time and of its exposed part, in microseconds
STEP_TARGETS_US: dict[int, tuple[float | None, float | None]] = {
    1: (150.0, 50.0),
    8: (None, None),
    64: (600.0, None),
    256: (2500.0, None),
}
EAGER_TARGET_MS = 3.0
OURS, OTHERS = "localgen", "other checkout"
_PROMPT_TOKENS = 100
_ROOT = Path(__file__).parents[1]
# values of one round, by test and unit
Figures = dict[tuple[str, str], float]


def step_figures(sizes: list[int], steps: int) -> Figures:
    """Processor times of decode steps. sizes: numbers of sequences. steps: measured for each."""
    rng, figures = random.Random(0), Figures()
    for size in sizes:
        prompts = [[rng.randrange(8) for _ in range(_PROMPT_TOKENS)] for _ in range(size)]
        with HostSteps(max_seqs=size) as host:
            times = host.measure(prompts, steps)
        test = f"step of {size} sequences"
        figures[test, "us"] = times.host_us
        figures[f"{test}, exposed", "us"] = times.exposed_us
        figures[f"{test}, results to next pass", "us"] = times.ahead_us
    return figures


def eager_figures(layers: int) -> Figures:
    """Processor times of a forward pass without CUDA graphs, and of its launches."""
    with EagerForward(layers=layers, sequences=3) as eager:
        figures = {(f"eager forward pass of {layers} layers", "ms"): eager.pass_ms()}
        kernels = eager.launches_us()
    for name, (count, us) in kernels.items():
        figures[f"one of {count} launches of {name}", "us"] = us
    return figures


def measure(options: argparse.Namespace) -> Figures:
    """Measure this checkout once."""
    sizes, steps, layers = ([1, 3], 20, 2) if options.quick else (list(STEP_TARGETS_US), 150, 32)
    figures = step_figures(sizes, steps) if "steps" in options.only else {}
    return figures | (eager_figures(layers) if "eager" in options.only else {})


def measure_other(checkout: Path, options: argparse.Namespace) -> Figures:
    """Measure another checkout of localgen once, with this benchmark, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "localgen").symlink_to(checkout.resolve() / "localgen")
        Path(folder, "benchmarks").symlink_to(_ROOT / "benchmarks")
        output = Path(folder, "result.json")
        quick = ["--quick"] if options.quick else ["--rounds", "1"]
        arguments = [*quick, "--only", *options.only, "--output", str(output)]
        subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_host", *arguments],
            check=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            stdout=subprocess.DEVNULL,
        )
        series = json.loads(output.read_text())["series"]
    return {(each["test"], each["unit"]): each["median"] for each in series}


def fill(report: Report, ours: list[Figures], theirs: list[Figures]) -> None:
    """Add the rounds of both sides to the report, and check them against the targets."""
    targets: dict[str, float | None] = {"eager forward pass of 32 layers": EAGER_TARGET_MS}
    for size, (host_us, exposed_us) in STEP_TARGETS_US.items():
        targets[f"step of {size} sequences"] = host_us
        targets[f"step of {size} sequences, exposed"] = exposed_us
    for test, unit in ours[0]:
        series = report.add(test, OURS, unit, [figures[test, unit] for figures in ours])
        target = targets.get(test)
        if target is not None:
            report.most(series, target)
        if theirs:
            values = [figures[test, unit] for figures in theirs]
            report.ratio(series, report.add(test, OTHERS, unit, values), 1.0, at_least=False)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.gpu_host")
    parser.add_argument("--quick", action="store_true", help="a short run: does it work?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=("steps", "eager"), default=("steps", "eager"))
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else options.rounds
    report = Report(ModelLine("no-op", 0, 0), rounds, options.quick, 1, {})
    report.commands.append(command("benchmarks.gpu_host", arguments))
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for _ in range(rounds):
        # both in processes of their own, if there are two
        ours.append(measure_other(_ROOT, options) if options.against else measure(options))
        if options.against:
            theirs.append(measure_other(options.against, options))
    fill(report, ours, theirs)
    print(report.text())
    report.save("gpu-host", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
