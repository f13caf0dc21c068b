"""The policy: the number of drafts of each sequence that maximizes tokens per millisecond.

The cost of a step is the median of the last few steps of its size, interpolated between sizes.
Drafts are assigned one by one, each to the sequence whose expected tokens it raises most. Of these
allocations, the fastest is chosen that slows no sequence down.
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

# minimum expected gain of drafts, and maximum slowdown of any one sequence, as factors
MIN_GAIN, MAX_SLOWDOWN = 1.02, 1.05
# the cost of a size is measured over its last few steps, and forgotten when they are older
_SAMPLES, _FORGET_STEPS = 5, 500


class StepCosts:
    """Milliseconds of a decode step by its number of sampled tokens."""

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
        """Tokens of the largest measured step; 0 without measurements."""
        return self._sizes[-1] if self._sizes else 0

    def observe(self, tokens: int, ms: float) -> None:
        """Record a finished step."""
        self._steps += 1
        if tokens not in self._ms:
            self._samples[tokens] = deque(maxlen=_SAMPLES)
            insort(self._sizes, tokens)
        samples = self._samples[tokens]
        samples.append(ms)
        # the lower median: the first step of a size may allocate buffers that later ones reuse
        self._ms[tokens] = sorted(samples)[(len(samples) - 1) // 2]
        self._last_step[tokens] = self._steps
        if self._steps % _FORGET_STEPS == 0:
            for size in [
                s for s, last in self._last_step.items() if last <= self._steps - _FORGET_STEPS
            ]:
                self._sizes.remove(size)
                del self._samples[size], self._last_step[size], self._ms[size]

    def ms(self, tokens: int) -> float:
        """Expected cost of a step; beyond the largest size, that of the largest. 0: unknown."""
        sizes, ms = self._sizes, self._ms
        if tokens in ms or not sizes:
            return ms.get(tokens, 0.0)
        at = bisect_left(sizes, tokens)
        if at in (0, len(sizes)):
            return ms[sizes[max(0, at - 1)]]
        low, high = sizes[at - 1], sizes[at]
        return ms[low] + (ms[high] - ms[low]) * (tokens - low) / (high - low)


class DraftOption(NamedTuple):
    """Possible drafts of one sequence. probs: acceptance probability of each."""

    drafter: Drafter
    probs: Seq[float]


class Allocation(NamedTuple):
    """drafts: number for each sequence. tokens, ms: expected of the step. gain: speed-up over plain
    decoding. loss_ms: extra time compared with plain steps for the same number of tokens."""

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
    """Return the fastest allocation with at least one draft, or None if there is none.

    options: one per sequence. step_ms: cost by number of tokens. max_drafts: limit of the step. The
    allocation may be slower than plain decoding.
    """
    count = len(options)
    plain_ms = step_ms(count)
    drafts, reached, expected = [0] * count, [1.0] * count, [1.0] * count
    heap = [(-option.probs[0], i) for i, option in enumerate(options) if option and option.probs]
    heapify(heap)
    best: Allocation | None = None
    total, tokens = 0, float(count)
    # drafting rounds; each round serves all sequences of its drafter
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
    """True for token counts worth measuring: kernels compute whole tiles of tokens."""
    return tokens <= 8 or tokens % (4 if tokens <= 32 else 16) == 0
