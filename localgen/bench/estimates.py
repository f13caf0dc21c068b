"""Intervals: how far from the truth a measured figure may be."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

_Z_95 = 1.959964
_RESAMPLES = 1_000


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share (0 to 1) of the values does not exceed, interpolated linearly."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    if at == low or ordered[low] == ordered[high]:  # with infinities, a difference is no number
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def wilson_interval(successes: int, trials: int, z: float = _Z_95) -> tuple[float, float]:
    """The interval of a share of successes that has the true one in 95 % of cases (Wilson 1927)."""
    if not trials:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(
    groups: Sequence[Sequence[float]], figure: Callable[[list[list[float]]], float], seed: int = 0
) -> tuple[float, float]:
    """The interval of a figure of groups of values, in 95 % of samples drawn from them again."""
    chance = random.Random(seed)
    figures = [
        figure([chance.choices(group, k=len(group)) for group in groups]) for _ in range(_RESAMPLES)
    ]
    return percentile(figures, 0.025), percentile(figures, 0.975)


def ratio_interval(
    before: Sequence[float], after: Sequence[float]
) -> tuple[float, float, float] | None:
    """Ratio of the means after / before, and its 95 % interval (Welch's, of the logarithms).

    None if a side has fewer than two values, or one that is not positive.
    """
    if min(len(before), len(after)) < 2 or min(*before, *after) <= 0:
        return None
    logs = [[math.log(value) for value in side] for side in (before, after)]
    shares = [statistics.variance(side) / len(side) for side in logs]
    centre = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    error = math.sqrt(sum(shares))
    if not error:
        return math.exp(centre), math.exp(centre), math.exp(centre)
    parts = [part * part / (len(side) - 1) for part, side in zip(shares, logs, strict=True)]
    freedom = math.pow(error, 4) / math.fsum(parts)
    half = _t_95(freedom) * error
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


def _t_95(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t, by bisection of its distribution function."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        if _t_tail(middle, freedom) > 0.025:
            low = middle
        else:
            high = middle
    return low


def _t_tail(t: float, freedom: float) -> float:
    """Probability above t, by Simpson's rule over the angle: t = sqrt(freedom) tan(angle)."""
    begin, end, steps = math.atan(t / math.sqrt(freedom)), math.pi / 2, 200
    width = (end - begin) / steps
    heights = [math.cos(begin + at * width) ** (freedom - 1) for at in range(steps)]
    heights.append(1.0 if freedom <= 1 else 0.0)
    weights = (1 if at in (0, steps) else 4 if at % 2 else 2 for at in range(steps + 1))
    area: float = width / 3 * sum(w * h for w, h in zip(weights, heights, strict=True))
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    return scale / math.sqrt(math.pi) * area
