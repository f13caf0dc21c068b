"""What a step takes by the number of its tokens, as measured while serving."""

from __future__ import annotations

import math
from itertools import pairwise

# steps of nearly as many tokens are one class
_CLASSES_PER_DOUBLING = 3
_WEIGHT = 0.2
_OLD_STEPS = 500


class _Mean:
    """A running mean that forgets, of tokens and of their time. last: the step it was fed in."""

    __slots__ = ("last", "ms", "seen", "tokens")

    def __init__(self) -> None:
        self.ms = self.tokens = 0.0
        self.seen = self.last = 0

    def add(self, tokens: int, ms: float, step: int) -> None:
        # a mean at first, so that an odd first step does not linger
        weight = max(_WEIGHT, 1.0 / (self.seen + 1))
        self.seen += 1
        self.last = step
        self.ms += weight * (ms - self.ms)
        self.tokens += weight * (tokens - self.tokens)


class StepCosts:
    """Milliseconds of a step with n tokens, each of them sampled."""

    def __init__(self) -> None:
        self._classes: dict[int, _Mean] = {}
        self._prompts = _Mean()
        self._steps = 0
        self._known: list[tuple[float, float]] = []  # (tokens, ms), ascending

    def observe(self, tokens: int, ms: float) -> None:
        """Enter a step in which all sequences were decoding."""
        self._steps += 1
        self._classes.setdefault(_class(tokens), _Mean()).add(tokens, ms, self._steps)
        self._forget_old()
        self._known = sorted((mean.tokens, mean.ms) for mean in self._classes.values())

    def observe_prompt(self, tokens: int, ms: float) -> None:
        """Enter a step of prompt tokens alone: what many tokens take at least."""
        self._prompts.add(tokens, ms, self._steps)

    @property
    def token_ms(self) -> float | None:
        """What a token of a prompt takes; None: none was seen."""
        return self._prompts.ms / self._prompts.tokens if self._prompts.seen else None

    def curve(self) -> list[tuple[float, float]]:
        """Sizes of steps that were measured, and what they take: (tokens, ms), ascending."""
        return self._known

    @property
    def largest(self) -> int:
        """Tokens of the largest step that was measured; 0: none."""
        return round(self._known[-1][0]) if self._known else 0

    def ms(self, tokens: int) -> float | None:
        """About what a step takes: between the nearest known sizes, beyond them by the price of a
        prompt's tokens. None: nothing is known yet.

        Where little is known this is too little rather than too much: trying tells.
        """
        known = self._known
        if not known:
            return None
        if tokens <= known[0][0]:
            return known[0][1]
        for (low, low_ms), (high, high_ms) in pairwise(known):
            if tokens <= high:
                return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)
        last, last_ms = known[-1]
        return last_ms + (tokens - last) * self._slope()

    def _slope(self) -> float:
        """Milliseconds of each token more than were ever seen in a step: the least that speaks
        for itself."""
        (first, first_ms), (last, last_ms) = self._known[0], self._known[-1]
        found = []
        if self._prompts.seen:
            found.append((self._prompts.ms - first_ms) / self._prompts.tokens)
        if last > first:
            found.append((last_ms - first_ms) / (last - first))
        return max(0.0, min(found, default=0.0))

    def _forget_old(self) -> None:
        """What was slow long ago may not be: sizes not tried for long count as unknown. The
        smallest stays, which all others are measured by."""
        smallest = min(self._classes)
        for size, mean in list(self._classes.items()):
            if size != smallest and self._steps - mean.last > _OLD_STEPS:
                del self._classes[size]


def _class(tokens: int) -> int:
    return tokens if tokens < 4 else round(_CLASSES_PER_DOUBLING * math.log2(tokens))
