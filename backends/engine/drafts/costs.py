"""What a step takes by the number of its tokens, as measured while serving."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

# the middle one of so many steps counts: one that something else delayed says nothing
_KEPT = 5
_OLD_STEPS, _LOOK_OVER = 500, 8
# fewer steps than this are not believed for longer than that
_SURE, _DOUBTED_STEPS = 3, 32


class _Size:
    """The latest steps of one size. last: when there was one. is_doubted: whether to try it anew,
    before anything is said of it."""

    __slots__ = ("_steps", "is_doubted", "last")

    def __init__(self) -> None:
        self.last, self.is_doubted = 0, False
        self._steps: deque[float] = deque(maxlen=_KEPT)

    @property
    def is_sure(self) -> bool:
        return len(self._steps) >= _SURE

    def add(self, ms: float, now: int) -> None:
        self.last, self.is_doubted = now, False
        self._steps.append(ms)

    @property
    def ms(self) -> float:
        # of two the faster: a first step may set up what later ones have
        return sorted(self._steps)[(len(self._steps) - 1) // 2]


class StepCosts:
    """Milliseconds of a step with n tokens, each of them sampled.

    Every size is for itself: processors compute tiles of tokens, so that 64 may well take less time
    than 63.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Size] = {}
        self._prompts: deque[tuple[int, float]] = deque(maxlen=_KEPT)  # (tokens, ms)
        self._now = 0
        self._sizes: list[int] = []  # ascending, with what each takes
        self._ms: list[float] = []

    def observe(self, tokens: int, ms: float) -> None:
        """Enter a step in which all sequences were decoding."""
        known = self._seen.setdefault(tokens, _Size())
        known.add(ms, self._now)
        at = bisect_left(self._sizes, tokens)
        if self._sizes[at : at + 1] == [tokens]:
            self._ms[at] = known.ms
        else:
            self._sort()

    def observe_prompt(self, tokens: int, ms: float) -> None:
        """Enter a step of prompt tokens alone: what many tokens take at least."""
        self._prompts.append((tokens, ms))

    def pass_by(self, *, keep_smallest: bool, doubt: bool = False) -> None:
        """A step of the engine goes by. What was slow long ago may not be: sizes not tried for
        long count as unknown.

        keep_smallest: but for the one which all others are measured by. doubt: there is time to try
        again what rests on a first step or two.
        """
        self._now += 1
        if self._now % _LOOK_OVER:
            return
        changed = False
        for size, one in list(self._seen.items()):
            age = self._now - one.last
            if keep_smallest and size == self._sizes[0]:
                continue
            if age > _OLD_STEPS:
                del self._seen[size]
                changed = True
            elif doubt and age > _DOUBTED_STEPS and not (one.is_sure or one.is_doubted):
                one.is_doubted = changed = True
        if changed:
            self._sort()

    def _sort(self) -> None:
        self._sizes = sorted(size for size, one in self._seen.items() if not one.is_doubted)
        self._ms = [self._seen[size].ms for size in self._sizes]

    def curve(self) -> list[tuple[int, float]]:
        """Sizes of steps that were measured, and what they take: (tokens, ms), ascending."""
        return list(zip(self._sizes, self._ms, strict=True))

    @property
    def smallest(self) -> int:
        """Tokens of the smallest step that was measured; 0: none."""
        return self._sizes[0] if self._sizes else 0

    @property
    def largest(self) -> int:
        """Tokens of the largest step that was measured, a prompt or not; 0: none decoded yet."""
        if not self._sizes:
            return 0
        return max(self._sizes[-1], *(tokens for tokens, _ in self._prompts), 0)

    def ms(self, tokens: int) -> float | None:
        """About what a step takes: between the nearest known sizes, beyond them by the price of a
        prompt's tokens. None: nothing is known yet.

        Where little is known this is too little rather than too much: trying tells.
        """
        sizes, ms = self._sizes, self._ms
        if not sizes:
            return None
        at = bisect_left(sizes, tokens)
        if at == 0:
            return ms[0]
        if at == len(sizes):
            return ms[-1] + (tokens - sizes[-1]) * self._slope()
        low, high = sizes[at - 1], sizes[at]
        return ms[at - 1] + (ms[at] - ms[at - 1]) * (tokens - low) / (high - low)

    def _slope(self) -> float:
        """Milliseconds of each token more than were ever seen in a step: the least that speaks
        for itself."""
        first_ms, more = self._ms[0], self._sizes[-1] - self._sizes[0]
        found = [(self._ms[-1] - first_ms) / more] if more else []
        if self._prompts:
            found.append(median((ms - first_ms) / tokens for tokens, ms in self._prompts))
        return max(0.0, min(found, default=0.0))
