"""Results of a GPU run: Markdown tables, and a JSON file with all values."""

from __future__ import annotations

import json
import os
import statistics
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measure import table

# figures of one side in one round, by name; names end with the unit
Figures = Mapping[str, float]
HEAD = (
    *("part", "test", "side", "rate", "TTFT p50/p99 ms", "ITL p50/p99 ms"),
    *("of datasheet", "of copy", "other figures"),
)
# the rate of a row is the first of these figures that it has
RATES = {
    "decode_tok_s": "tok/s",
    "tok_s": "tok/s",
    "gb_s": "GB/s",
    "tflop_s": "TFLOP/s",
    "first_token_s": "s to the first token",
}
_PLACED = (
    *("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"),
    *("share_datasheet", "share_copy"),
)
# kernels of a table in Markdown, and characters of their names; the JSON file has all
_KERNELS, _NAME_CHARS = 12, 60


@dataclass(frozen=True, slots=True)
class Row:
    """Values of one side of a test, by figure and round."""

    part: str
    test: str
    side: str
    figures: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float | None:
        """Median of a figure over the rounds; None if the row does not have it."""
        values = self.figures.get(name)
        return statistics.median(values) if values else None

    def cells(self) -> tuple[str, ...]:
        """Cells of the columns in HEAD: medians; the rate also with its minimum and maximum."""
        rate = next((name for name in RATES if name in self.figures), None)
        rest = [name for name in self.figures if name not in (*_PLACED, rate)]
        besides = ", ".join(f"{name} {_number(self.median(name))}" for name in rest)
        return (
            *(self.part, self.test, self.side, "" if rate is None else self._rate(rate)),
            *(self._pair("ttft"), self._pair("itl")),
            *(_percent(self.median(f"share_{of}")) for of in ("datasheet", "copy")),
            besides,
        )

    def _rate(self, name: str) -> str:
        values = self.figures[name]
        text = f"{_number(self.median(name))} {RATES[name]}"
        if len(values) == 1:
            return text
        return f"{text} ({_number(min(values))}–{_number(max(values))})"

    def _pair(self, name: str) -> str:
        pair = [self.median(f"{name}_p{share}_ms") for share in (50, 99)]
        return "" if None in pair else " / ".join(map(_number, pair))


@dataclass(frozen=True, slots=True)
class CorrectnessCheck:
    """A correctness check.

    error: must not exceed `most`. problem: error message in one line, or empty. detail: of a
    failed check: traceback, output of its process, or where the largest error is.
    """

    name: str
    error: float
    most: float
    problem: str = ""
    detail: str = ""

    @classmethod
    def raised(cls, name: str, error: BaseException) -> CorrectnessCheck:
        """A check that an exception ended."""
        return cls(name, 0.0, 0.0, format_error(error), "".join(traceback.format_exception(error)))

    @property
    def passed(self) -> bool:
        return not self.problem and self.error <= self.most  # NaN is not

    def line(self) -> str:
        """Describe a failed check in one line."""
        if self.problem:
            return f"{self.name}: {self.problem}"
        where = f", {self.detail}" if self.detail else ""
        return f"{self.name}: off by {self.error:.3g}, allowed {self.most:.3g}{where}"


def lost_unit(unit: str) -> str:
    """Name of the failed check of a part that ended early."""
    return f"part {unit}"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Kernel launches of one name. count, total_us: per step. median_us: of a launch."""

    name: str
    count: float
    total_us: float
    median_us: float


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Time by kernel of a step, longest first."""

    side: str
    test: str
    kernels: tuple[KernelTime, ...]

    def text(self) -> str:
        """The kernels that take longest, as Markdown."""
        whole_us = sum(kernel.total_us for kernel in self.kernels)
        rows = [
            (
                *(kernel.name[:_NAME_CHARS], f"{kernel.count:.4g}", _number(kernel.total_us)),
                *(_number(kernel.median_us), _percent(kernel.total_us / max(whole_us, 1e-9))),
            )
            for kernel in self.kernels[:_KERNELS]
        ]
        head = ("kernel", "count", "total us", "median us", "share")
        title = f"{self.side}, {self.test}: {_number(whole_us)} us in {len(self.kernels)} kernels"
        return f"{title}\n\n{table(head, rows)}".rstrip()


@dataclass(slots=True)
class GpuReport:
    """Results of a run, or of one part of it.

    skipped: names and reasons. cut: tests skipped for lack of time. modes: how models ran, by name.
    clocks: before and after each part. kernels: registers and memory of each variant of a Triton
    kernel that ran. diagnoses: output of lost checks that were run again, by what they were run
    with. path: JSON file that is rewritten at each new result.
    """

    quick: bool
    seed: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commands: list[str]
    cut: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    checks: list[CorrectnessCheck] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    models: list[Mapping[str, Any]] = field(default_factory=list)
    modes: dict[str, str] = field(default_factory=dict)
    kernel_times: list[KernelTable] = field(default_factory=list)
    part_s: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, list[str]] = field(default_factory=dict)
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    diagnoses: dict[str, str] = field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def read(cls, path: Path) -> GpuReport:
        """Read the JSON file of a report. Raises OSError or ValueError."""
        found = json.loads(path.read_text(encoding="utf-8"))
        report = cls(
            quick=found["quick"],
            seed=found["seed"],
            machine=found["machine"],
            versions=found["versions"],
            commands=found["commands"],
            cut=found["cut"],
        )
        report.rows = [
            Row(
                row["part"],
                row["test"],
                row["side"],
                {name: tuple(values) for name, values in row["figures"].items()},
            )
            for row in found["rows"]
        ]
        report.checks = [
            CorrectnessCheck(*(c[name] for name in ("name", "error", "most", "problem", "detail")))
            for c in found["checks"]
        ]
        report.skipped = [(name, reason) for name, reason in found["skipped"]]
        report.models, report.modes = found["models"], found["modes"]
        report.kernel_times = [
            KernelTable(
                *(times["side"], times["test"]),
                tuple(KernelTime(**kernel) for kernel in times["kernels"]),
            )
            for times in found["kernel_times"]
        ]
        report.part_s, report.clocks = found["part_s"], found["clocks"]
        report.kernels, report.diagnoses = found["kernels"], found["diagnoses"]
        return report

    def merge(self, part: GpuReport) -> None:
        """Add the results of a part."""
        self.cut += part.cut
        self.rows += part.rows
        self.checks += part.checks
        self.skipped += part.skipped
        self.models += [model for model in part.models if model not in self.models]
        self.modes |= part.modes
        self.kernel_times += part.kernel_times
        self.part_s |= part.part_s
        self.clocks |= part.clocks
        self.kernels |= part.kernels
        self.diagnoses |= part.diagnoses

    def add(self, part: str, test: str, side: str, rounds: Sequence[Figures]) -> Row:
        """Add one side of a test: its figures in each round, all with the same names."""
        names = rounds[0].keys()
        figures = {name: tuple(figures[name] for figures in rounds) for name in names}
        row = Row(part, test, side, figures)
        self.rows.append(row)
        self.save()
        return row

    def add_kernel_times(self, times: KernelTable) -> None:
        """Add the time by kernel of a step."""
        self.kernel_times.append(times)
        self.save()

    def check(self, check: CorrectnessCheck) -> None:
        """Add a check."""
        self.checks.append(check)
        self.save()

    @property
    def failed(self) -> list[CorrectnessCheck]:
        return [check for check in self.checks if not check.passed]

    def text(self) -> str:
        """The results as Markdown."""
        passed = len(self.checks) - len(self.failed)
        modes = ", ".join(f"{name}: {mode}" for name, mode in self.modes.items())
        parts = [
            f"# {self.machine.get('gpu') or self.machine['cpu']}"
            + (", quick: the figures mean nothing" if self.quick else ""),
            ", ".join(f"{name} {number}" for name, number in self.versions.items()),
            f"{passed} of {len(self.checks)} checks passed.",
            f"Modes: {modes}." if modes else "",
            _list("Failed", [check.line() for check in self.failed]),
            table(HEAD, [row.cells() for row in self.rows]) if self.rows else "",
            *(kernels.text() for kernels in self.kernel_times),
            _list("Skipped", [f"{name}: {reason}" for name, reason in self.skipped]),
            _list("Cut for lack of time", self.cut),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, path: Path) -> None:
        """Write the results as JSON, and as Markdown to the same path with suffix .md."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, self._json())
        _replace(path.with_suffix(".md"), self.text())

    def save(self) -> None:
        """Write the results so far to `path`, if there is one: the process may be killed."""
        if self.path is not None:
            _replace(self.path, self._json())

    def _json(self) -> str:
        whole: dict[str, Any] = {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "checks": [asdict(check) | {"passed": check.passed} for check in self.checks],
            "rows": [
                asdict(row) | {"medians": {name: row.median(name) for name in row.figures}}
                for row in self.rows
            ],
        }
        del whole["path"]
        return json.dumps(whole, indent=1, ensure_ascii=False, default=asdict) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def format_error(error: BaseException) -> str:
    """Format an exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"- {line}" for line in lines)]) if lines else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
