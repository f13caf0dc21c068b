"""The policy: how many drafts each sequence gets, so that most tokens come per millisecond.

The price of a step is the median of the last few of its size, interpolated between sizes. Drafts
are handed out one by one, each to the sequence whose expected tokens it raises most; of the totals
on that path the fastest is taken that slows no sequence down.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from localgen.backends.engine.speculation.drafter import Drafter

# drafts must gain this factor, and no sequence may get its tokens later by more than that one
MIN_GAIN, MAX_SLOWDOWN = 1.02, 1.05
# a price is of the last few steps of its size, and forgotten when they are older than this
_SAMPLES, _FORGET_STEPS = 5, 500


class StepCosts:
    """Milliseconds of a step by its number of tokens, each of them sampled."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._last_step: dict[int, int] = {}
        self._ms: dict[int, float] = {}
        self._sizes: list[int] = []  # ascending
        self._steps = 0

    def __contains__(self, tokens: int) -> bool:
        return tokens in self._ms

    @property
    def largest(self) -> int:
        """Tokens of the largest step that was measured; 0: none was."""
        return self._sizes[-1] if self._sizes else 0

    def observe(self, tokens: int, ms: float) -> None:
        """Record a finished step."""
        self._steps += 1
        if tokens not in self._ms:
            self._samples[tokens] = deque(maxlen=_SAMPLES)
            insort(self._sizes, tokens)
        samples = self._samples[tokens]
        samples.append(ms)
        # of two samples the faster: a first step may allocate what later ones reuse
        self._ms[tokens] = sorted(samples)[(len(samples) - 1) // 2]
        self._last_step[tokens] = self._steps
        if self._steps % _FORGET_STEPS == 0:
            for size in [
                s for s, last in self._last_step.items() if last <= self._steps - _FORGET_STEPS
            ]:
                self._sizes.remove(size)
                del self._samples[size], self._last_step[size], self._ms[size]

    def ms(self, tokens: int) -> float:
        """The price of a step; beyond all sizes that of the largest: trying tells. 0: unknown."""
        sizes, ms = self._sizes, self._ms
        if tokens in ms or not sizes:
            return ms.get(tokens, 0.0)
        at = bisect_left(sizes, tokens)
        if at in (0, len(sizes)):
            return ms[sizes[max(0, at - 1)]]
        low, high = sizes[at - 1], sizes[at]
        return ms[low] + (ms[high] - ms[low]) * (tokens - low) / (high - low)


class DraftOption(NamedTuple):
    """Drafts that one sequence could be given, with the probability that each is accepted."""

    drafter: Drafter
    probs: Seq[float]


class Allocation(NamedTuple):
    """drafts: of each sequence. tokens, ms: expected of the step. gain: tokens per millisecond,
    against plain decoding. loss_ms: what it takes longer than plain steps for as many tokens."""

    drafts: list[int]
    tokens: float
    ms: float
    gain: float
    loss_ms: float


def allocate(
    options: Seq[DraftOption | None],
    step_ms: Callable[[int], float],
    *,
    max_drafts: int,
    max_slowdown: float = MAX_SLOWDOWN,
) -> Allocation | None:
    """The fastest allocation that has any draft, whether it gains or not; None: there is none.

    options: one for each sequence. step_ms: price by number of tokens. max_drafts: of the step.
    """
    count = len(options)
    plain_ms = step_ms(count)
    drafts, reached, expected = [0] * count, [1.0] * count, [1.0] * count
    heap = [(-option.probs[0], i) for i, option in enumerate(options) if option and option.probs]
    heapify(heap)
    best: Allocation | None = None
    total, tokens = 0, float(count)
    # all sequences of a drafter take part in each of its rounds
    rounds: dict[Drafter, int] = {}
    while heap and total < max_drafts:
        i = heappop(heap)[1]
        option = options[i]
        assert option is not None
        reached[i] *= option.probs[drafts[i]]
        expected[i] += reached[i]
        tokens += reached[i]
        drafts[i] += 1
        total += 1
        rounds[option.drafter] = max(rounds.get(option.drafter, 0), drafts[i])
        if drafts[i] < len(option.probs):
            heappush(heap, (-reached[i] * option.probs[drafts[i]] / expected[i], i))
        if heap and total < max_drafts and not _fills_tiles(count + total):
            continue
        ms = step_ms(count + total) + sum(n * drafter.draft_ms() for drafter, n in rounds.items())
        gain = tokens * plain_ms / (count * ms) if ms else inf
        if (best is None or gain > best.gain) and min(expected) * max_slowdown * plain_ms >= ms:
            best = Allocation(list(drafts), tokens, ms, gain, ms - tokens / count * plain_ms)
    return best


def _fills_tiles(tokens: int) -> bool:
    """Kernels compute tiles of tokens: sizes between them are not worth measuring."""
    return tokens <= 8 or tokens % (4 if tokens <= 32 else 16) == 0
