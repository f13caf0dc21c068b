"""Results of a GPU run: a Markdown table, and a JSON file with all values."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    """A correctness check. error: must not exceed `most`. problem: error message; empty: none."""

    name: str
    error: float
    most: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem and self.error <= self.most  # NaN is not

    def line(self) -> str:
        """Describe a failed check in one line."""
        return f"{self.name}: {self.problem or f'off by {self.error:.3g}, allowed {self.most:.3g}'}"


@dataclass(slots=True)
class GpuReport:
    """Results of a run. skipped: names and reasons. cut: tests skipped for lack of time."""

    quick: bool
    seed: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commands: list[str]
    cut: list[str]
    rows: list[Row] = field(default_factory=list)
    checks: list[CorrectnessCheck] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    models: list[Mapping[str, Any]] = field(default_factory=list)
    part_s: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, test: str, side: str, rounds: Sequence[Figures]) -> Row:
        """Add one side of a test: its figures in each round, all with the same names."""
        names = rounds[0].keys()
        figures = {name: tuple(figures[name] for figures in rounds) for name in names}
        row = Row(part, test, side, figures)
        self.rows.append(row)
        return row

    @property
    def failed(self) -> list[CorrectnessCheck]:
        return [check for check in self.checks if not check.passed]

    def text(self) -> str:
        """The results as Markdown."""
        passed = len(self.checks) - len(self.failed)
        parts = [
            f"# {self.machine.get('gpu') or self.machine['cpu']}"
            + (", quick: the figures mean nothing" if self.quick else ""),
            ", ".join(f"{name} {number}" for name, number in self.versions.items()),
            f"{passed} of {len(self.checks)} checks passed.",
            _list("Failed", [check.line() for check in self.failed]),
            table(HEAD, [row.cells() for row in self.rows]) if self.rows else "",
            _list("Skipped", [f"{name}: {reason}" for name, reason in self.skipped]),
            _list("Cut for lack of time", self.cut),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, path: Path) -> None:
        """Write the results as JSON, and as Markdown to the same path with suffix .md."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = asdict(self) | {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "checks": [asdict(check) | {"passed": check.passed} for check in self.checks],
            "rows": [
                asdict(row) | {"medians": {name: row.median(name) for name in row.figures}}
                for row in self.rows
            ],
        }
        path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(self.text(), encoding="utf-8")


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
