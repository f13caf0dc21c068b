"""Figures of real plays beside those of simulated ones."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.measure import Report

HEAD = ("replicas", "load", "seed", "figure", "real", "again", "simulated", "difference")
SUMMARY_HEAD = (
    *("replicas", "load", "figure", "real", "simulated", "difference"),
    *("of each seed", "between real plays"),
)


@dataclass(frozen=True, slots=True)
class Play:
    """Requests that were all answered. prompt_tokens, cached_tokens: of all of them. took_s: from
    the first arrival to the last token."""

    ttft_s: Sequence[float]
    prompt_tokens: int
    cached_tokens: int
    took_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of plays, with the TTFT over the requests of all of them. took_s: mean of the plays."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    took_s: float

    @classmethod
    def of(cls, plays: Sequence[Play]) -> Figures:
        times_s = list(itertools.chain.from_iterable(each.ttft_s for each in plays))
        return cls(
            sum(each.cached_tokens for each in plays) / sum(each.prompt_tokens for each in plays),
            statistics.mean(times_s),
            statistics.median(times_s),
            float(np.percentile(times_s, 95)),
            statistics.mean(each.took_s for each in plays),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plays of the same requests. load: share of the cores that they take."""

    replicas: int
    load: float
    seed: int
    real: Sequence[Play]
    simulated: Sequence[Play]

    def difference(self, name: str) -> float:
        """Of the figure of the simulated plays to that of the real ones, as a share of it."""
        return _figure(self.simulated, name) / _figure(self.real, name) - 1

    def spread(self, name: str) -> float:
        """Of the figures of single real plays, as a share of that of all."""
        values = _of_each(self.real, name)
        return (max(values) - min(values)) / _figure(self.real, name)

    def rows(self) -> list[tuple[str, ...]]:
        """Lines of the table, with the figure of all simulated plays."""
        setting = (str(self.replicas), f"{self.load:g}", str(self.seed))
        found: list[tuple[str, ...]] = []
        for name in Figures.__slots__:
            values = (*_of_each(self.real, name), _figure(self.simulated, name))
            texts = (f"{value:.3f}" for value in values)
            found.append((*setting, name, *texts, f"{self.difference(name):+.1%}"))
        return found

    def add_to(self, report: Report) -> None:
        for name in Figures.__slots__:
            test = f"{self.replicas} replicas, load {self.load:g}, seed {self.seed}: {name}"
            report.add(test, "real", "", _of_each(self.real, name))
            report.add(test, "simulated", "", _of_each(self.simulated, name))
            report.add(f"{test}, difference", "simulated", "", [self.difference(name)])


def _figure(plays: Sequence[Play], name: str) -> float:
    return float(getattr(Figures.of(plays), name))


def _of_each(plays: Sequence[Play], name: str) -> list[float]:
    return [_figure([each], name) for each in plays]


def together(comparisons: Sequence[Comparison]) -> Comparison:
    """All plays of comparisons of one load. The nth real one is the nth plays of all seeds."""
    first = comparisons[0]
    real = [_joined(nth) for nth in zip(*(each.real for each in comparisons), strict=True)]
    simulated = [play for each in comparisons for play in each.simulated]
    return Comparison(first.replicas, first.load, first.seed, real, simulated)


def _joined(plays: Sequence[Play]) -> Play:
    return Play(
        [each for play in plays for each in play.ttft_s],
        sum(each.prompt_tokens for each in plays),
        sum(each.cached_tokens for each in plays),
        statistics.mean(each.took_s for each in plays),
    )


def add_summary(comparisons: Sequence[Comparison], report: Report) -> list[tuple[str, ...]]:
    """Add the figures of all plays of a load to the report. Returns a line for each.

    The last column is how far the real plays of all seeds are from those of all seeds again.
    """
    found: list[tuple[str, ...]] = []
    for _, group in itertools.groupby(comparisons, lambda each: each.load):
        of_seeds = list(group)
        all_plays = together(of_seeds)
        for name in Figures.__slots__:
            real, simulated = (
                _figure(each, name) for each in (all_plays.real, all_plays.simulated)
            )
            test = f"{all_plays.replicas} replicas, load {all_plays.load:g}, all plays: {name}"
            report.add(test, "real", "", [real])
            report.add(test, "simulated", "", [simulated])
            setting = (str(all_plays.replicas), f"{all_plays.load:g}", name)
            differences = ", ".join(f"{each.difference(name):+.1%}" for each in of_seeds)
            spread = f"{all_plays.spread(name):.1%}"
            values = (f"{real:.3f}", f"{simulated:.3f}", f"{all_plays.difference(name):+.1%}")
            found.append((*setting, *values, differences, spread))
    return found
