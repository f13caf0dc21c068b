"""Goodput: the highest rate at which nearly all requests keep a service level."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from localgen.bench.estimates import wilson_interval

# of the bounds: they are looked at after each request, and there are several rates
_Z = 3.3
_MAX_PROBES = 15
# as close as the bounds shall come
_CLOSE_ENOUGH = 1.1
# while the rate is doubled, so many requests that keep the level are enough
_FIRST_REQUESTS, MIN_REQUESTS, _MAX_REQUESTS = 20, 10, 250


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate: how many requests kept the level, of all."""

    rate: float
    kept: int
    total: int


@dataclass(slots=True)
class Goodput:
    """The search so far. share: of the requests that should keep the level.

    The higher the rate, the fewer keep it. So the requests of neighbouring rates together say
    something about the lowest and the highest of them.
    """

    share: float
    probes: list[Probe] = field(default_factory=list)

    @property
    def low(self) -> float:
        """The highest rate that surely keeps the level; 0 if none does."""
        windows = self._windows()
        return max((w[0].rate for w in windows if self._bounds(w)[0] > self.share), default=0.0)

    @property
    def high(self) -> float:
        """The lowest rate that surely does not; infinity if all do."""
        windows = self._windows()
        return min(
            (w[-1].rate for w in windows if self._bounds(w)[1] < self.share), default=math.inf
        )

    @property
    def rate(self) -> float:
        """The highest rate whose requests kept the level, below the first that surely did not."""
        rates = {p.rate for p in self.probes if p.rate < self.high}
        return max(filter(self._seems_kept, rates), default=0.0)

    def next_rate(self, start: float) -> float | None:
        """The rate to try next: twice the highest one, then in the widest gap. None: it is found.

        start: the first rate.
        """
        if not self.probes:
            return start
        if len(self.probes) >= _MAX_PROBES:
            return None
        high = self.high
        begin = self.low or self.rate
        if math.isinf(high):
            return 2 * max(probe.rate for probe in self.probes)
        if not begin:
            return min(probe.rate for probe in self.probes) / 2
        rates = sorted({p.rate for p in self.probes if begin <= p.rate <= high})
        widest, rate = max((late / early, early) for early, late in pairwise(rates))
        if widest > _CLOSE_ENOUGH:
            return rate * math.sqrt(widest)
        if self.low:
            return None
        # more requests there, else fewer per second
        total = sum(probe.total for probe in self.probes if probe.rate == begin)
        return begin if total < 2 * _MAX_REQUESTS else begin / 2

    def is_enough(self, kept: int, total: int) -> bool:
        """True if a rate has had enough requests."""
        if total < MIN_REQUESTS:
            return False
        is_first = math.isinf(self.high) and kept == total >= _FIRST_REQUESTS
        low, high = wilson_interval(kept, total, _Z)
        return is_first or low > self.share or high < self.share or total >= _MAX_REQUESTS

    def _seems_kept(self, rate: float) -> bool:
        probes = [probe for probe in self.probes if probe.rate == rate]
        return sum(p.kept for p in probes) >= self.share * sum(p.total for p in probes)

    def _windows(self) -> Iterator[list[Probe]]:
        """All runs of neighbouring rates."""
        ordered = sorted(self.probes, key=lambda probe: probe.rate)
        ends = range(1, len(ordered) + 1)
        return (ordered[begin:end] for end in ends for begin in range(end))

    @staticmethod
    def _bounds(probes: list[Probe]) -> tuple[float, float]:
        kept, total = sum(p.kept for p in probes), sum(p.total for p in probes)
        return wilson_interval(kept, total, _Z)


def find_goodput(
    probe: Callable[[float, Goodput], Probe | None], start: float, share: float
) -> Goodput:
    """Search for the goodput: double the rate until the level is lost, then bisect.

    probe: tries a rate until Goodput.is_enough(); None ends the search, as there is no more time.
    """
    found = Goodput(share)
    while (rate := found.next_rate(start)) is not None:
        tried = probe(rate, found)
        if tried is None:
            break
        found.probes.append(tried)
    return found
