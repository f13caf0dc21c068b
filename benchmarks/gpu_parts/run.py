"""A run: each unit in a process of its own, whose results are merged."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu_parts.clock import Clock
from benchmarks.gpu_parts.parts import PARTS, most_seconds
from benchmarks.gpu_parts.plan import FULL, QUICK, full_plan
from benchmarks.gpu_parts.processes import ProcessEnd, Processes
from benchmarks.gpu_parts.progress import progress
from benchmarks.gpu_parts.report import CorrectnessCheck, GpuReport, lost_unit

RESULTS = Path(__file__).parents[1] / "results"
DEVICE = "device"
# a unit may finish what it has begun when its time is over; its process is ended after this much
# more, and the last one this long after the time of the run
_OVERTIME_SHARE, _OVERTIME_S, _LAST_S = 0.5, 20.0, 40.0
# parts of which a unit is run again if something fails, by what, and for how long
CHECKING = ("device", "checks", "modes")
_MEMCHECK = "compute-sanitizer"
DIAGNOSES: Mapping[str, tuple[str, ...]] = {
    "launches that wait": ("env", "CUDA_LAUNCH_BLOCKING=1"),
    # each tensor has memory of its own: else what lies beside it is memory of the process too
    "memcheck": ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", _MEMCHECK, "--tool", "memcheck"),
}
_DIAGNOSIS_S = 60.0


@dataclass(frozen=True, slots=True)
class UnitProcess:
    """The process of a unit. seconds: its time; ended after limit_s. before: results so far."""

    unit: str
    quick: bool
    seed: int
    seconds: float
    limit_s: float
    before: Path
    output: Path

    @property
    def arguments(self) -> list[str]:
        """Arguments of benchmarks.gpu."""
        return [
            *("--part", self.unit, "--seed", str(self.seed), *(["--quick"] if self.quick else [])),
            *("--seconds", f"{self.seconds:.1f}", "--limit", f"{self.limit_s:.1f}"),
            *("--before", str(self.before), "--output", str(self.output)),
        ]


def run_process(unit: UnitProcess, processes: Processes, prefix: Sequence[str] = ()) -> ProcessEnd:
    """Run a unit to its end. prefix: program and arguments that its command follows."""
    command = [*prefix, sys.executable, "-u", "-m", "benchmarks.gpu", *unit.arguments]
    return processes.run(unit.unit, command, unit.limit_s)


class GpuRun:
    """Runs units and merges what they write into the report.

    folder: for temporary files. seconds: time of the run; by default that of `calls` CALLS. output:
    result file; by default it is named for the device.
    """

    def __init__(
        self,
        report: GpuReport,
        processes: Processes,
        folder: Path,
        *,
        calls: int,
        seconds: float | None = None,
        output: Path | None,
    ) -> None:
        self._report, self._processes, self._folder = report, processes, folder
        self._plan = QUICK if report.quick else FULL
        self._clock = Clock(calls * self._plan.call_s if seconds is None else seconds)
        self._time_share = 1.0  # of the time of each unit
        self._output = output
        self._diagnosing, self._is_diagnosed = threading.Lock(), False
        self._begun = datetime.now(UTC)
        report.cut, report.path = self._clock.cut, folder / "before.json"

    @property
    def target(self) -> Path:
        """The result file."""
        words = str(self._report.machine.get("gpu") or "cpu").lower().removeprefix("nvidia").split()
        name = f"gpu-{'-'.join(words)}-{self._begun:%Y%m%d-%H%M%S}.json"
        return self._output or RESULTS / name

    def find_device(self) -> bool:
        """Describe and try the device, and choose the sizes for it; False if there is no GPU."""
        (found,) = self._units([DEVICE], 1)
        if "gpu" not in found.machine:
            return True  # it is lost, and named as failed: each part finds out what still works
        self._report.machine, self._report.versions = found.machine, found.versions
        if self._report.quick:
            return True
        if found.machine["gpu"] is None:
            return False
        self._plan = full_plan(found.machine["gpu_memory_bytes"])
        return True

    def measure(self, names: Sequence[str]) -> None:
        """Run parts, or units given as PART/SIDE, in this order.

        If there is not enough time for all of them, each has the same share of its own.
        """
        needed_s = most_seconds(names, self._plan)
        self._time_share = max(0.0, min(1.0, self._clock.left_s / needed_s))
        self._report.write(self.target)  # again after each unit
        for name in names:
            part_name, _, side = name.partition("/")
            part = PARTS[part_name]
            if name != DEVICE:
                units = [name] if side else part.units(name, self._plan)
                at_once = min(part.at_once, max(1, (os.cpu_count() or 1) // 2))
                for _ in self._units(units, at_once):
                    self._report.write(self.target)

    def _units(self, units: Sequence[str], at_once: int) -> Iterator[GpuReport]:
        """Run units, `at_once` at the same time; yield what each found after it is merged."""
        with ThreadPoolExecutor(at_once) as pool:
            try:
                for found in pool.map(self._unit, units):
                    self._report.merge(found)
                    self._report.save()
                    yield found
            except BaseException:
                self._processes.close()
                raise

    def _unit(self, unit: str) -> GpuReport:
        part_name = unit.partition("/")[0]
        most_s = self._time_share * PARTS[part_name].most_s
        seconds = self._clock.seconds(unit, most_s)
        nothing = GpuReport(self._report.quick, self._report.seed, {}, {}, [])
        if seconds is None:
            return nothing
        assert self._report.path is not None
        slug = "".join(c if c.isalnum() else "-" for c in unit)
        process = UnitProcess(
            *(unit, self._report.quick, self._report.seed),
            seconds=seconds,
            limit_s=min(
                (1 + _OVERTIME_SHARE) * seconds + _OVERTIME_S, self._clock.left_s + _LAST_S
            ),
            before=self._report.path,
            output=self._folder / f"{slug}.json",
        )
        progress(f"{unit} …")
        begun_s = time.monotonic()
        ended = run_process(process, self._processes)
        found, problem = nothing, ended.problem or "it wrote no results"
        with contextlib.suppress(OSError, ValueError, KeyError):
            found, problem = GpuReport.read(process.output), ended.problem
        if problem:
            found.checks.append(lost_check(unit, problem, ended))
            progress(f"FAILED {found.checks[-1].line()}")
        if part_name in CHECKING and any(check.problem for check in found.checks):
            found.diagnoses |= self._diagnosed(process)
        found.part_s = {unit: time.monotonic() - begun_s}
        return found

    def _diagnosed(self, failed: UnitProcess) -> dict[str, str]:
        """Run the first unit in which something failed again, with what shows where it failed.

        Returns the ends of the outputs, by name.
        """
        with self._diagnosing:
            if self._is_diagnosed or self._clock.left_s <= 0:
                return {}
            self._is_diagnosed = True
        found = {}
        for name, prefix in DIAGNOSES.items():
            if _MEMCHECK in prefix and shutil.which(_MEMCHECK) is None:
                continue
            limit_s = min(_DIAGNOSIS_S, self._clock.left_s + _LAST_S)
            again = replace(failed, limit_s=limit_s, output=self._folder / "diagnosis.json")
            ended = run_process(again, self._processes, prefix)
            found[f"{failed.unit}, {name}"] = ended.output
        return found


def lost_check(unit: str, problem: str, ended: ProcessEnd) -> CorrectnessCheck:
    """The failed check of a unit whose process did not end well."""
    during = f", during: {ended.last_case}" if ended.last_case else ""
    return CorrectnessCheck(lost_unit(unit), 0.0, 0.0, problem + during, ended.output)
