"""The time that a step of a run has left, by its whole units."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# time constant of the exponential decay
_SMOOTHING_S = 20.0


class StepEta:
    """Estimates the remaining time of a step: seconds per item of the latest ones.

    Items and the time that they took both decay with time, so that a slow first item does not count
    long against many fast ones.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = ""
        self._done = self._total = 0
        self._last_item_s = 0.0
        self._items = self._items_s = 0.0  # decayed sums
        self._item_s: float | None = None

    def update(self, step: str, done: int, total: int) -> None:
        """Record progress of a step. A new step starts a new estimate."""
        now = self._clock()
        if step != self._step or done < self._done:
            self._step, self._done, self._last_item_s, self._item_s = step, done, now, None
            self._items = self._items_s = 0.0
        elif done > self._done:
            took_s = now - self._last_item_s
            decay = math.exp(-took_s / _SMOOTHING_S)
            self._items = decay * self._items + done - self._done
            self._items_s = decay * self._items_s + took_s
            self._item_s = self._items_s / self._items
            self._done, self._last_item_s = done, now
        self._total = total

    def remaining_s(self) -> float | None:
        """Remaining time of the current step, or None if unknown yet."""
        item_s = self._item_s  # read once: update() runs in another thread
        if item_s is None:
            return None
        # subtract the time already spent on the current item, at most its average
        going_s = min(self._clock() - self._last_item_s, item_s)
        return max(0.0, item_s * (self._total - self._done) - going_s)
