"""Check and measure localgen on a GPU: kernels, workloads, hardware limits and other engines.

python -m benchmarks.gpu [--quick] [--plan A|B|C | --only PART,...] [--minutes M] [--output FILE]

Each part runs in a process of its own: python -m benchmarks.gpu --part PART --output FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import secrets
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.device import Device, versions
from benchmarks.gpu_parts.parts import CALLS, PARTS, run_unit
from benchmarks.gpu_parts.plan import QUICK, full_plan
from benchmarks.gpu_parts.processes import Processes
from benchmarks.gpu_parts.report import GpuReport
from benchmarks.gpu_parts.run import GpuRun
from benchmarks.measure import command, machine
from benchmarks.termination import ended_by_sigterm


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a check or a part failed, 2 without a GPU."""
    options = _options(arguments)
    if options.part:
        faulthandler.enable()
        # ends this process even if it hangs outside Python, and shows where
        faulthandler.dump_traceback_later(options.limit, exit=True)
        measure_part(options)
        return 0
    report = GpuReport(
        quick=options.quick,
        seed=options.seed,
        machine=machine(),
        versions=versions(),
        commands=[command("benchmarks.gpu", arguments)],
    )
    calls = 1 if options.plan or options.only else len(CALLS)
    with (
        ended_by_sigterm(),
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Processes()) as processes,
    ):
        seconds = None if options.minutes is None else 60 * options.minutes
        run = GpuRun(
            *(report, processes, Path(folder)), calls=calls, seconds=seconds, output=options.output
        )
        if not run.find_device():
            print("error: torch finds no GPU: --quick runs on a CPU", file=sys.stderr)
            return 2
        run.measure(options.only or CALLS.get(options.plan, tuple(PARTS)))
    print(report.text())
    print(f"written to {run.target}", file=sys.stderr)
    return 1 if report.failed else 0


def measure_part(options: argparse.Namespace) -> None:
    """Run one unit in this process; its report is written to a file at each new result."""
    device = Device.found(gpu=not options.quick)
    report = GpuReport(options.quick, options.seed, device.describe(), versions(), [])
    report.path = options.output
    plan = full_plan(device.memory_bytes) if device.is_gpu else QUICK
    before = GpuReport.read(options.before) if options.before.is_file() else None
    run_unit(options.part, GpuBench(device, plan, report, before), options.seconds)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python -m benchmarks.gpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes, on a CPU")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--plan", choices=CALLS, help="parts of a call of nine minutes")
    which.add_argument("--only", type=_parts, help=", ".join(PARTS))
    which.add_argument("--part", type=_unit, help="PART or PART/SIDE, in this process")
    parser.add_argument("--minutes", type=float, help="time of the run, which its parts share")
    parser.add_argument("--seed", type=int, help="seed of the random inputs (default: random)")
    parser.add_argument("--output", type=Path, help="result file; a Markdown table is also written")
    alone = parser.add_argument_group("with --part")
    alone.add_argument("--before", type=Path, default=Path(), help="results: ceilings, modes")
    alone.add_argument("--seconds", type=float, default=60.0, help="time for it")
    alone.add_argument("--limit", type=float, default=600.0, help="seconds until it is ended")
    options = parser.parse_args(arguments)
    if options.minutes is not None and options.minutes <= 0:
        parser.error("--minutes: more than 0")
    if options.seed is None:
        options.seed = secrets.randbits(31)
    return options


def _parts(text: str) -> tuple[str, ...]:
    order = list(PARTS)  # each uses results of those before it
    names = map(_unit, text.split(","))
    return tuple(sorted(names, key=lambda name: order.index(name.partition("/")[0])))


def _unit(text: str) -> str:
    name = text.partition("/")[0]
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"no part {name!r}, only {', '.join(PARTS)}")
    return text


if __name__ == "__main__":
    sys.exit(main())
