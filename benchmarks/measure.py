"""Measurement series, per-round ratios, tables and result files."""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

import localgen

RATE = "t/s"
RESULTS = Path(__file__).parent / "results"
_LIBRARIES = ("llama-cpp-python", "numpy", "fastapi", "uvicorn", "httpx", "msgspec")


@dataclass(frozen=True, slots=True)
class ModelLine:
    """Model columns of a table, as printed by llama-bench."""

    name: str
    size_bytes: int
    params: int

    def cells(self) -> tuple[str, ...]:
        size, count = self.size_bytes / 2**20, self.params / 1e6
        params = f"{count / 1e3:.2f} B" if count >= 1e3 else f"{count:.2f} M"
        return self.name, f"{size:.2f} MiB", params


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one side of a test, one per round, in `unit`."""

    test: str
    side: str
    unit: str
    values: tuple[float, ...]
    model: ModelLine

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 for a single round."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """A figure and its target. low, high: its range over the rounds.

    at_least: the target is a minimum, else a maximum.
    """

    name: str
    value: float
    low: float
    high: float
    target: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    def row(self) -> tuple[str, ...]:
        """Table cells: name, target, measured value, range, met."""
        sign, unit = "≥" if self.at_least else "≤", f" {self.unit}" if self.unit else ""
        spread = f"{self.low:.3g}–{self.high:.3g}"
        measured = f"{self.value:.3g}{unit}"
        met = "yes" if self.met else "NO"
        return self.name, f"{sign} {self.target:g}{unit}", measured, spread, met


@dataclass(slots=True)
class Report:
    """Results of a run.

    commands: command lines of the run, without folders.
    load_options: localgen's options that differ from its defaults.
    not_compared: comparisons that were not possible, with the reasons.
    """

    model: ModelLine
    rounds: int
    quick: bool
    threads: int
    load_options: dict[str, int]
    commands: list[str] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    checks: list[TargetCheck] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    _path: Path | None = field(default=None, init=False)

    def add(self, test: str, side: str, unit: str, values: Sequence[float]) -> Series:
        """Add one side of a test."""
        entered = Series(test, side, unit, tuple(values), self.model)
        self.series.append(entered)
        return entered

    def ratio(self, ours: Series, theirs: Series, target: float, *, at_least: bool) -> None:
        """Check the median of the per-round ratios ours / theirs."""
        pairs = zip(ours.values, theirs.values, strict=True)
        ratios = [mine / other for mine, other in pairs]
        name = f"{ours.test}: {ours.side} ÷ {theirs.side}"
        self._check(name, ratios, target, at_least)

    def most(self, series: Series, target: float) -> None:
        """Check that the median does not exceed the target."""
        name = f"{series.test}: {series.side}"
        self._check(name, series.values, target, False, series.unit)

    def least(self, series: Series, target: float) -> None:
        """Check that the median reaches the target."""
        name = f"{series.test}: {series.side}"
        self._check(name, series.values, target, True, series.unit)

    def _check(
        self, name: str, values: Sequence[float], target: float, at_least: bool, unit: str = ""
    ) -> None:
        self.checks.append(
            TargetCheck(
                name, statistics.median(values), min(values), max(values), target, at_least, unit
            )
        )

    def text(self) -> str:
        """Markdown tables: speeds in llama-bench's format, other figures, targets."""
        rates = [
            (*s.model.cells(), s.side, s.test, f"{s.median:.2f} ± {s.deviation:.2f}")
            for s in self.series
            if s.unit == RATE
        ]
        others = [
            (s.side, s.test, f"{s.median:.2f} ± {s.deviation:.2f} {s.unit}")
            for s in self.series
            if s.unit != RATE
        ]
        tables = [
            table(("model", "size", "params", "backend", "test", "t/s"), rates),
            table(("side", "test", "median ± deviation"), others),
            table(
                ("target", "wanted", "measured", "spread", "met"), [c.row() for c in self.checks]
            ),
        ]
        return "\n".join([*tables, *(f"not compared: {line}" for line in self.not_compared)])

    def save(self, benchmark: str, output: Path | None) -> None:
        """Write the results so far to `output` or a file in `results/`, and say where on stderr.

        Every time to the same file.
        """
        if self._path is None:
            self._path = output or RESULTS / f"{benchmark}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        self.write(self._path)
        print(f"written to {self._path}", file=sys.stderr)

    def write(self, path: Path) -> None:
        """Write the results as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        checks = [asdict(check) | {"met": check.met} for check in self.checks]
        series = [asdict(s) | {"median": s.median, "deviation": s.deviation} for s in self.series]
        whole = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": self.quick,
            "rounds": self.rounds,
            "threads": self.threads,
            "load_options": self.load_options,
            "machine": machine(),
            "versions": versions(),
            "model": asdict(self.model),
            "commands": self.commands,
            "checks": checks,
            "not_compared": self.not_compared,
            "series": series,
        }
        path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    text.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(text) + "\n"


def command(module: str, arguments: Sequence[str] | None) -> str:
    """Command line of a run, without folders. arguments: default sys.argv."""
    given = sys.argv[1:] if arguments is None else arguments
    shown = [Path(argument).name if "/" in argument else argument for argument in given]
    return shlex.join(["python", "-m", module, *shown])


def machine() -> dict[str, Any]:
    """Describe the machine."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Versions of localgen, Python and the libraries."""
    found = {name: version(name) for name in _LIBRARIES}
    return {"localgen": localgen.__version__, "python": platform.python_version(), **found}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
