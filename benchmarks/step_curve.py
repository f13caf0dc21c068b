"""What a step takes by its number of tokens, and what drafts could gain by that at most."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence as Seq
from itertools import pairwise

from localgen.backends.engine.runner import Chunk, ModelRunner
from localgen.backends.engine.sequence import Sequence
from localgen.backends.types import BASE_SAMPLING, SamplingParams

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 48, 64)
_GREEDY = SamplingParams(temperature=0.0).with_defaults(BASE_SAMPLING)

# small ones cost least and say most: so many of each in a round
_SMALL, _REPEATED = 4, 3

# milliseconds of a step, by its tokens; of several
Curve = dict[int, float]
Steps = dict[int, list[float]]


def measure(
    runner: ModelRunner, vocab: int, *, context: int, rounds: int, sizes: Seq[int] = SIZES
) -> Steps:
    """Steps of one sequence behind so many tokens, each token sampled as it is when drafts are
    verified: values of each round."""
    chance = random.Random(0)
    most = context + max(sizes)
    seq = Sequence(
        id="curve",
        tokens=[chance.randrange(vocab) for _ in range(context)],
        num_prompt=context,
        params=_GREEDY,
        ctx=most,
        limit=most,
    )
    seq.num_computed = runner.admit(seq, spare=0)
    _read(runner, seq, context - 1)
    sizes = [size for size in sizes if size <= runner.limits.max_outputs]
    found: Steps = {size: [] for size in sizes}
    for number in range(-1, rounds):  # the first round warms up
        for size in sizes if number % 2 else reversed(sizes):
            for _ in range(_REPEATED if size <= _SMALL else 1):
                drafts = [chance.randrange(vocab) for _ in range(size - 1)]
                ms = _step_ms(runner, seq, drafts)
                if number >= 0:
                    found[size].append(ms)
    runner.release(seq, keep=False)
    return found


def _read(runner: ModelRunner, seq: Sequence, until: int) -> None:
    while seq.num_computed < until:
        count = min(runner.limits.max_batch_tokens, until - seq.num_computed)
        assert runner.grow(seq, count)
        tokens = seq.tokens[seq.num_computed : seq.num_computed + count]
        chunk = Chunk(seq=seq, start=seq.num_computed, tokens=tokens, samples=False)
        runner.collect(runner.launch([chunk]))
        seq.num_computed += count


def _step_ms(runner: ModelRunner, seq: Sequence, drafts: list[int]) -> float:
    start = seq.num_computed
    assert runner.grow(seq, 1 + len(drafts))
    chunk = Chunk(
        seq=seq,
        start=start,
        tokens=[seq.tokens[-1], *drafts],
        num_drafts=len(drafts),
        samples=True,
    )
    begun_s = time.perf_counter()
    runner.collect(runner.launch([chunk]))
    ms = (time.perf_counter() - begun_s) * 1e3
    runner.rewind(seq, start)
    return ms


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
