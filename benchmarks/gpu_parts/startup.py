"""Measure the time from process start to the first token, with model files in the page cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.gpu_parts.bench import GpuBench, Side
from benchmarks.gpu_parts.checkpoint import write_checkpoint
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import Figures

PART = "startup"
# free disk and memory required, relative to the size of the checkpoint
_SPARE = 1.3
_TIMEOUT_S = 120
_ROUNDS = 3


def startup(bench: GpuBench, budget: Budget) -> None:
    """Measure a start, and the first start, which compiles its kernels."""
    shape = bench.plan.plain
    with tempfile.TemporaryDirectory(prefix="localgen-benchmark-") as name:
        folder, needed = Path(name), 2 * shape.spec.num_params
        free = min(shutil.disk_usage(folder).free, psutil.virtual_memory().available)
        if free < _SPARE * needed:
            reason = f"{free / 1e9:.0f} GB are free, {_SPARE * needed / 1e9:.0f} are needed"
            bench.report.skipped.append((PART, reason))
            return
        begun_s = time.monotonic()
        case_begins(f"write {shape.name}")
        size = write_checkpoint(folder / "model", shape.spec, bench.device)
        wrote_s = time.monotonic() - begun_s
        bench.device.free()
        bench.report.add(PART, f"write {size / 1e9:.2g} GB", shape.name, [{"write_s": wrote_s}])
        sides: dict[str, Side] = {
            f"{shape.name}, first start": lambda: _start(bench, folder, fresh=True),
            shape.name: lambda: _start(bench, folder, fresh=False),
        }
        for side, run in sides.items():
            test = "to the first token"
            rounds = min(bench.plan.rounds, _ROUNDS) if side == shape.name else 1
            if budget.fits(f"{test}, {side}"):
                bench.rounds(PART, test, {side: run}, rounds, budget)


def _start(bench: GpuBench, folder: Path, *, fresh: bool) -> Figures:
    """Run first_token in a process. fresh: with an empty Triton cache. Raises RuntimeError."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        if fresh:
            environment["TRITON_CACHE_DIR"] = empty
        more = [] if bench.device.is_gpu else ["--cpu"]
        module = "benchmarks.gpu_parts.first_token"
        done = subprocess.run(
            [sys.executable, "-m", module, str(folder / "model"), str(time.monotonic()), *more],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{module}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
