"""Measured duration of decode steps by their size."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

# a size is measured over its last few steps, and forgotten when they are older
_SAMPLES, _FORGET_STEPS = 5, 500


class StepCosts:
    """Milliseconds of a decode step by its number of sampled tokens."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._last_step: dict[int, int] = {}
        self._ms: dict[int, float] = {}
        self._sizes: list[int] = []  # of all of these, ascending
        self._steps = 0

    def __contains__(self, tokens: int) -> bool:
        return tokens in self._ms

    @property
    def largest(self) -> int:
        """Tokens of the largest measured step; 0 without measurements."""
        return self._sizes[-1] if self._sizes else 0

    def clear(self) -> None:
        """Forget all measurements: later steps take another time."""
        for each in (self._samples, self._last_step, self._ms, self._sizes):
            each.clear()

    def observe(self, tokens: int, ms: float) -> None:
        """Record a finished step."""
        self._steps += 1
        is_new = tokens not in self._ms
        self._last_step[tokens] = self._steps
        samples = self._samples.setdefault(tokens, deque(maxlen=_SAMPLES))
        samples.append(ms)
        # the lower median: the first step of a size may allocate buffers that later ones reuse
        self._ms[tokens] = sorted(samples)[(len(samples) - 1) // 2]
        if is_new or self._steps % _FORGET_STEPS == 0:
            oldest = self._steps - _FORGET_STEPS
            for size in [size for size, step in self._last_step.items() if step <= oldest]:
                del self._samples[size], self._last_step[size], self._ms[size]
            self._sizes = sorted(self._ms)

    def ms(self, tokens: int) -> float:
        """Expected cost of a step; beyond the largest size, that of the largest. 0: unknown."""
        sizes, ms = self._sizes, self._ms
        if tokens in ms or not sizes:
            return ms.get(tokens, 0.0)
        at = bisect_left(sizes, tokens)
        low, high = sizes[max(0, at - 1)], sizes[min(at, len(sizes) - 1)]
        return ms[low] + (ms[high] - ms[low]) * (tokens - low) / max(1, high - low)
