"""The time that is left of a step, smoothed."""

from __future__ import annotations

import math
from collections.abc import Callable

# so long a measurement counts for
_MEMORY_S = 20.0


class Pace:
    """Learns what one of many takes, by those that were done while somebody looked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step = ""
        self._done = self._total = 0
        self._at_s = 0.0
        self._each_s: float | None = None

    def at(self, step: str, done: int, total: int) -> None:
        """How far it is now."""
        now = self._clock()
        if step != self._step or done < self._done:
            self._step, self._done, self._at_s, self._each_s = step, done, now, None
        elif done > self._done:
            took_s = now - self._at_s
            each_s = took_s / (done - self._done)
            if self._each_s is not None:
                weight = 1 - math.exp(-took_s / _MEMORY_S)
                each_s = self._each_s + weight * (each_s - self._each_s)
            self._each_s, self._done, self._at_s = each_s, done, now
        self._total = total

    def left_s(self) -> float | None:
        """Of the step; None: not known yet."""
        if self._each_s is None:
            return None
        # the one that is being worked on goes on since
        going_s = min(self._clock() - self._at_s, self._each_s)
        return max(0.0, self._each_s * (self._total - self._done) - going_s)
