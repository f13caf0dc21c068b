"""What a step takes by its number of tokens, and what drafts could gain by that at most."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from benchmarks.in_turn import TURN_S
from localgen.backends.runner.interface import Chunk, ModelRunner
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 48, 64)
_GREEDY = SamplingParams(temperature=0.0).with_defaults(BASE_SAMPLING)

# small ones cost least and say most: so many of each in a row at least, and as many as fit into a
# turn, since the first of them find what steps of another size have left
_SMALL, _REPEATED = 8, 3
# a target's step comes after so many of the draft model's at most: more leave no more in the caches
_DRAFTS_BEFORE = 8

# milliseconds of a step, by its tokens; of several
Curve = dict[int, float]
Steps = dict[int, list[float]]


@dataclass(frozen=True, slots=True)
class Measured:
    """steps: of each size, of every round. drafts: the draft model's of one token, between them."""

    steps: Steps
    drafts: list[float]


class _Text:
    """One sequence behind so many tokens, of which steps are taken and forgotten."""

    def __init__(
        self, runner: ModelRunner, vocab: int, *, context: int, chance: random.Random
    ) -> None:
        self._runner, self._any_token = runner, partial(chance.randrange, vocab)
        most = context + max(SIZES)
        self._seq = Sequence(
            id="curve",
            tokens=[self._any_token() for _ in range(context)],
            num_prompt=context,
            params=_GREEDY,
            ctx=most,
            max_len=most,
        )
        self._seq.num_computed = runner.admit(self._seq, spare=0)
        self._read(context - 1)

    def _read(self, until: int) -> None:
        runner, seq = self._runner, self._seq
        while seq.num_computed < until:
            count = min(runner.limits.max_batch_tokens, until - seq.num_computed)
            assert runner.grow(seq, count)
            tokens = seq.tokens[seq.num_computed : seq.num_computed + count]
            chunk = Chunk(seq=seq, start=seq.num_computed, tokens=tokens, is_sampled=False)
            runner.collect(runner.launch([chunk]))
            seq.num_computed += count

    def step_ms(self, drafts: int = 0) -> float:
        """Of its last token and so many drafts, each sampled as it is when they are verified."""
        runner, seq = self._runner, self._seq
        start = seq.num_computed
        assert runner.grow(seq, 1 + drafts)
        chunk = Chunk(
            seq=seq,
            start=start,
            tokens=[seq.tokens[-1], *(self._any_token() for _ in range(drafts))],
            num_drafts=drafts,
            is_sampled=True,
        )
        begun_s = time.perf_counter()
        runner.collect(runner.launch([chunk]))
        ms = (time.perf_counter() - begun_s) * 1e3
        runner.rewind(seq, start)
        return ms

    def close(self) -> None:
        """Leave the runner."""
        self._runner.release(self._seq, keep=False)


def measure(
    target: ModelRunner, vocab: int, *, context: int, rounds: int, draft: ModelRunner | None = None
) -> Measured:
    """Steps behind so many tokens.

    draft: a model that drafts before each step of several tokens, as it does in use: where steps
    are small, those of both would be cheaper on their own, for each leaves the caches to the other.
    """
    chance = random.Random(0)
    texts = [
        _Text(runner, vocab, context=context, chance=chance) for runner in (target, draft) if runner
    ]
    sizes = [size for size in SIZES if size <= target.limits.max_outputs]
    found = Measured({size: [] for size in sizes}, [])
    for number in range(-1, rounds):  # the first round warms up
        into = found if number >= 0 else Measured({size: [] for size in sizes}, [])
        for size in sizes if number % 2 else reversed(sizes):
            _in_a_row(size, into, *texts)
    for text in texts:
        text.close()
    return found


def _in_a_row(size: int, found: Measured, target: _Text, draft: _Text | None = None) -> None:
    """Steps of one size, and of the draft model between them."""
    least, until_s = _REPEATED if size <= _SMALL else 1, time.perf_counter() + TURN_S
    while least > 0 or time.perf_counter() < until_s:
        if draft is not None:
            found.drafts.extend(draft.step_ms() for _ in range(min(size - 1, _DRAFTS_BEFORE)))
        found.steps[size].append(target.step_ms(size - 1))
        least -= 1


def medians(found: Steps) -> Curve:
    """The curve of a measurement."""
    return {size: statistics.median(values) for size, values in found.items()}


def step_ms(curve: Curve, tokens: int) -> float:
    """On the line between the measured sizes."""
    points = sorted(curve.items())
    for (low, low_ms), (high, high_ms) in pairwise(points):
        if tokens <= high:
            return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)
    return points[-1][1]


def tokens_per_step(alpha: float, drafts: int) -> float:
    """Expected, if each draft is right with probability alpha when those before it are: the closed
    form of Leviathan et al. 2023, (1 − α^(k+1))/(1 − α)."""
    return float(drafts + 1) if alpha >= 1 else (1 - alpha ** (drafts + 1)) / (1 - alpha)


def best(curve: Curve, alpha: float, draft_ms: float) -> tuple[int, float]:
    """The number of drafts that gains most, of those whose step was measured, and what it gains; 0
    drafts gain 1.

    draft_ms: what proposing one draft takes.
    """
    plain_ms = step_ms(curve, 1)
    return max(
        ((size - 1, _gain(curve, alpha, size - 1, draft_ms, plain_ms)) for size in curve),
        key=lambda found: found[1],
    )


def _gain(curve: Curve, alpha: float, drafts: int, draft_ms: float, plain_ms: float) -> float:
    took_ms = step_ms(curve, 1 + drafts) + drafts * draft_ms
    return tokens_per_step(alpha, drafts) * plain_ms / took_ms
