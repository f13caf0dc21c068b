"""The compared model, and the report of its comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Report
from localgen.backends.cuda.model.source import GgufModelSource


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """A GGUF file. threads: of llama.cpp on both sides."""

    path: Path
    source: GgufModelSource
    threads: int
    report: Report

    def none_of(self, test: str, what: str, count: int, total: int) -> None:
        """Report the number of differences in `total` comparisons; the target is 0."""
        series = self.report.add(test, what, f"of {total:,}", [count])
        self.report.most(series, 0.0)
