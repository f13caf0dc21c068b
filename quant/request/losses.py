"""Losses of a model on held-out text, with intervals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a 95 % interval."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class DomainLoss:
    """Losses on the windows of one domain; fields as in EvalRow."""

    domain: str
    windows: int
    perplexity: float
    kl: float | None = None
    kl_interval: Interval | None = None
    perplexity_change: Interval | None = None


@dataclass(frozen=True, slots=True)
class KlDifference:
    """KL of `second` minus KL of `first`, in nats, on the same windows. Models by name.

    interval: None if there are too few windows for one.
    """

    first: str
    second: str
    difference: float
    interval: Interval | None
