"""The model under comparison, and where results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Report
from localgen.backends.cuda.model.source import GgufModelSource


@dataclass(frozen=True, slots=True)
class Subject:
    """A GGUF file. threads: of llama.cpp on both sides."""

    path: Path
    source: GgufModelSource
    threads: int
    report: Report

    def none_of(self, test: str, what: str, count: int, total: int) -> None:
        """Enter a number of differences, which must be 0, of a total."""
        series = self.report.add(test, what, f"of {total:,}", [count])
        self.report.most(series, 0.0)
