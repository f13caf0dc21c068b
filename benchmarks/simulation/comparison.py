"""Figures of real plays beside those of simulated ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measure import Report

HEAD = ("replicas", "load", "seed", "figure", "real", "again", "simulated", "difference")
SUMMARY_HEAD = ("replicas", "figure", "median difference", "of all", "between real plays")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a play of all requests."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plays of the same requests. load: share of the cores that they take."""

    replicas: int
    load: float
    seed: int
    real: Sequence[Figures]
    simulated: Sequence[Figures]

    def difference(self, name: str) -> float:
        """Of the mean of the simulated plays to that of the real ones, as a share of it."""
        real, simulated = _values(self.real, name), _values(self.simulated, name)
        return statistics.mean(simulated) / statistics.mean(real) - 1

    def spread(self, name: str) -> float:
        """Of the real plays, as a share of their mean."""
        values = _values(self.real, name)
        return (max(values) - min(values)) / statistics.mean(values)

    def rows(self) -> list[tuple[str, ...]]:
        """Lines of the table, with the mean of the simulated plays."""
        setting = (str(self.replicas), f"{self.load:g}", str(self.seed))
        found: list[tuple[str, ...]] = []
        for name in Figures.__slots__:
            mean = statistics.mean(_values(self.simulated, name))
            values = (f"{value:.3f}" for value in (*_values(self.real, name), mean))
            found.append((*setting, name, *values, f"{self.difference(name):+.1%}"))
        return found

    def add_to(self, report: Report) -> None:
        for name in Figures.__slots__:
            test = f"{self.replicas} replicas, load {self.load:g}, seed {self.seed}: {name}"
            report.add(test, "real", "", _values(self.real, name))
            report.add(test, "simulated", "", _values(self.simulated, name))


def _values(plays: Sequence[Figures], name: str) -> list[float]:
    return [getattr(each, name) for each in plays]


def summary(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """A line for each figure of some comparisons with as many replicas."""
    found: list[tuple[str, ...]] = []
    for name in Figures.__slots__:
        differences = [each.difference(name) for each in comparisons]
        spread = statistics.median(each.spread(name) for each in comparisons)
        all_of_them = ", ".join(f"{each:+.1%}" for each in differences)
        median = f"{statistics.median(differences):+.1%}"
        found.append((str(comparisons[0].replicas), name, median, all_of_them, f"{spread:.1%}"))
    return found
