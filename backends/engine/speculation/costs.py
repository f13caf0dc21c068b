"""What a step takes by the number of its tokens, as measured while serving."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

# prompts of fewer tokens, most of which are read already, say nothing of what each takes
_PROMPT_TOKENS = 32
# the middle one of so many steps counts: one that something else delayed says nothing
_KEPT = 5
_OLD_STEPS, _LOOK_OVER = 500, 8
# fewer steps than this are not believed for longer than that, one size at a time
_SURE, _DOUBTED_STEPS = 3, 16
# but it stays in doubt until it could have been tried twice, however rarely somebody looks
_DOUBTED_LOOKS = 2


class _Size:
    """The latest steps of one size. last: when there was one. is_doubted: whether it counts as
    unknown, so that it is tried again; since when, and how often that was looked over."""

    __slots__ = ("_steps", "is_doubted", "last", "looks", "since")

    def __init__(self) -> None:
        self.last, self.since, self.looks, self.is_doubted = 0, 0, 0, False
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
        known = self._seen.get(tokens)
        if known is None:
            known = self._seen[tokens] = _Size()
        known.add(ms, self._now)
        at = bisect_left(self._sizes, tokens)
        if self._sizes[at : at + 1] == [tokens]:
            self._ms[at] = known.ms
        else:
            self._sort()

    def observe_prompt(self, tokens: int, ms: float) -> None:
        """Enter a step of prompt tokens alone: what many tokens take at least."""
        if tokens >= _PROMPT_TOKENS:
            self._prompts.append((tokens, ms))

    def pass_by(self, steps: int = 1, *, keep_smallest: bool, to_risk_ms: float = 0.0) -> None:
        """So many steps of the engine go by, or looks at a draft model. What was slow long ago may
        not be: sizes not tried for long count as unknown.

        keep_smallest: but for the one which all others are measured by. to_risk_ms: what another
        try may take, beyond a step of that one, of a size of which a step or two is all that is
        known.
        """
        since, self._now = self._now, self._now + steps
        if self._now // _LOOK_OVER == since // _LOOK_OVER:
            return
        kept = self._sizes[:1] if keep_smallest else []
        old = [
            size
            for size, one in self._seen.items()
            if self._now - one.last > _OLD_STEPS and size not in kept
        ]
        for size in old:
            del self._seen[size]
        if self._doubt(kept, to_risk_ms) or old:
            self._sort()

    def _doubt(self, kept: list[int], to_risk_ms: float) -> bool:
        """Doubt one size, or that one no longer if nobody has wanted it; whether one of these."""
        doubted = next((one for one in self._seen.values() if one.is_doubted), None)
        if doubted is not None:
            doubted.looks += 1
            if self._now - doubted.since <= _DOUBTED_STEPS or doubted.looks < _DOUBTED_LOOKS:
                return False
            doubted.is_doubted, doubted.last = False, self._now
            return True
        unsure = [
            one
            for size, one in self._seen.items()
            if not one.is_sure
            and size not in kept
            and self._now - one.last > _DOUBTED_STEPS
            and one.ms - self._ms[0] <= to_risk_ms
        ]
        if not unsure:
            return False
        longest = min(unsure, key=lambda one: one.last)
        longest.is_doubted, longest.since, longest.looks = True, self._now, 0
        return True

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
