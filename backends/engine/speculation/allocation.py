"""Drafts are assigned one by one, each to the sequence whose expected tokens it raises most."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from localgen.backends.engine.speculation.drafter import Drafter

# maximum slowdown of any one sequence, as a factor
MAX_SLOWDOWN = 1.05


class DraftOption(NamedTuple):
    """Possible drafts of one sequence. probs: acceptance probability of each."""

    drafter: Drafter
    probs: Seq[float]


class Allocation(NamedTuple):
    """drafts: number for each sequence. speedup: expected, over plain decoding. ms: of the step."""

    drafts: list[int]
    speedup: float = 0.0
    ms: float = 0.0


def allocate(
    options: Seq[DraftOption | None],
    step_ms: Callable[[int], float],
    *,
    max_drafts: int,
    max_slowdown: float = MAX_SLOWDOWN,
) -> Allocation:
    """Return the fastest allocation with at least one draft. Its speedup is 0 if there is none.

    options: one per sequence. step_ms: cost by number of tokens. max_drafts: limit of the step.
    """
    count, most = len(options), max((len(each.probs) for each in options if each), default=0)
    probs = np.zeros((count, most))
    for row, option in enumerate(options):
        if option:
            probs[row, : len(option.probs)] = option.probs
    # [sequences, drafts]: probability that a draft and those before it are accepted; 0: no draft
    reached = np.cumprod(probs, axis=1)
    expected = 1.0 + np.cumsum(reached, axis=1) - reached  # tokens, without this draft
    gains = reached / expected
    # of each assignment in turn: the sequence, and the number of drafts that it had before
    order = np.argsort(-gains, axis=None, kind="stable")[: min(max_drafts, np.count_nonzero(gains))]
    if not order.size:
        return Allocation([0] * count)
    rows, before = np.divmod(order, most)
    mean_tokens = 1.0 + np.cumsum(reached.flat[order]) / count
    # the minimum: of a sequence that gets a later draft, or of one that gets no more
    final = 1.0 + np.bincount(rows, reached.flat[order], count).min()
    min_tokens = np.minimum.accumulate(np.append(expected.flat[order], final)[:0:-1])[::-1]
    ms = np.array([step_ms(count + total) for total in range(1, order.size + 1)], float)
    for drafter in {option.drafter for option in options if option}:
        is_own = np.array([bool(option and option.drafter is drafter) for option in options])
        # each round drafts for all sequences of the drafter
        ms += drafter.draft_ms() * np.maximum.accumulate(np.where(is_own[rows], before + 1, 0))
    speedup = mean_tokens * step_ms(count) / ms
    speedup[min_tokens * step_ms(count) * max_slowdown < ms] = 0.0
    best = int(np.argmax(speedup))
    drafts = np.bincount(rows[: best + 1], minlength=count)
    return Allocation(drafts.tolist(), float(speedup[best]), float(ms[best]))
