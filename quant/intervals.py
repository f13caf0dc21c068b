"""95 % intervals of means over windows of text: a paired bootstrap, stratified by domain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localgen.quant.request.losses import Interval

_RESAMPLES = 10_000
_SEED = 0
_DRAWS_AT_ONCE = 1 << 20
_TAIL_PERCENT = 2.5
# fewer windows have no interval, as it would be too narrow
MIN_WINDOWS = 8
_MIN_WINDOWS_PER_DOMAIN = 2


class PairedBootstrap:
    """Intervals for windows of these domains. All intervals are of the same resamples.

    Windows of each domain are drawn with replacement (Efron 1979), so the interval of a difference
    of two models' values is that of a paired test. It covers other windows of the same kind of
    text, not other kinds. domains: of each window; empty if there are none.
    """

    def __init__(self, domains: Sequence[str], num_windows: int) -> None:
        labels = np.array(domains if domains else [""] * num_windows)
        assert len(labels) == num_windows
        self._strata = [
            np.nonzero(labels == domain)[0] for domain in dict.fromkeys(labels.tolist())
        ]
        smallest = min(map(len, self._strata))
        self._is_usable = num_windows >= MIN_WINDOWS and smallest >= _MIN_WINDOWS_PER_DOMAIN

    def interval(self, values: NDArray[np.float64]) -> Interval | None:
        """Interval of the mean of `values` [windows]; None if there are too few windows."""
        if not self._is_usable:
            return None
        sums = self._resampled_sums(values) / len(values)
        low, high = np.percentile(sums, (_TAIL_PERCENT, 100 - _TAIL_PERCENT))
        return Interval(float(low), float(high))

    def _resampled_sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[_RESAMPLES], the same draws at each call."""
        generator = np.random.default_rng(_SEED)
        sums = np.zeros(_RESAMPLES)
        for stratum in self._strata:
            size = len(stratum)
            mean = values[stratum].mean()
            # the variance of a resampled mean is too small by (size - 1) / size
            deviations = (values[stratum] - mean) * (size / (size - 1)) ** 0.5
            at_once = max(1, _DRAWS_AT_ONCE // size)
            for start in range(0, _RESAMPLES, at_once):
                rows = min(at_once, _RESAMPLES - start)
                drawn = generator.integers(size, size=(rows, size))
                sums[start : start + rows] += size * mean + deviations[drawn].sum(1)
        return sums


def ratio_interval(totals: Sequence[float], counts: Sequence[int]) -> Interval | None:
    """Interval of Σ totals / Σ counts over texts of different lengths, drawn as a whole.

    None if there are fewer than MIN_WINDOWS texts.
    """
    size = len(counts)
    if size < MIN_WINDOWS:
        return None
    generator = np.random.default_rng(_SEED)
    sums, lengths = np.asarray(totals, np.float64), np.asarray(counts, np.float64)
    ratios = []
    at_once = max(1, _DRAWS_AT_ONCE // size)
    for start in range(0, _RESAMPLES, at_once):
        drawn = generator.integers(size, size=(min(at_once, _RESAMPLES - start), size))
        ratios.append(sums[drawn].sum(1) / lengths[drawn].sum(1))
    low, high = np.percentile(np.concatenate(ratios), (_TAIL_PERCENT, 100 - _TAIL_PERCENT))
    return Interval(float(low), float(high))
