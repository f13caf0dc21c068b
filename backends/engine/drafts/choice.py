"""How many drafts each sequence gets in the next step, so that tokens come fastest."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

# lengths that are tried: fine where it matters, then coarse
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
# what is gained, in the logarithm, has to be more than the noise of what is known
_LEAST_GAIN = math.log(1.03)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a drafter could propose for one sequence.

    tokens[k]: expected tokens of a step with k drafts, the one after them included.
    """

    drafter: int
    tokens: tuple[float, ...]

    @classmethod
    def of(cls, drafter: int, chances: Seq[float]) -> Offer:
        """The expectation that follows from each draft's chance, those before it being right."""
        expected, reached = [1.0], 1.0
        for chance in chances:
            reached *= chance
            expected.append(expected[-1] + reached)
        return cls(drafter, tuple(expected))


@dataclass(frozen=True, slots=True)
class Pick:
    """So many drafts by this drafter; 0: none."""

    drafter: int = 0
    drafts: int = 0


def choose(
    offers: Seq[Seq[Offer]],
    step_ms: Callable[[int], float],
    draft_ms: Callable[[list[Pick]], float],
    *,
    most: int,
) -> list[Pick]:
    """A pick for each sequence, from what is offered to it.

    step_ms: of a step with that many tokens. draft_ms: of proposing what was picked. most: drafts
    in one step. What grows is the product of all sequences' tokens/s, and their sum at least does
    not shrink: one that drafts much makes the step longer for all, and has to gain more than the
    others lose. They are settled one after the other, twice, the most promising first.
    """
    count = len(offers)
    picks, gained = [Pick()] * count, [1.0] * count
    plain_ms = step_ms(count)
    plain = best = -count * math.log(plain_ms)
    order = sorted(
        (at for at, offered in enumerate(offers) if offered),
        key=lambda at: -max(offer.tokens[-1] for offer in offers[at]),
    )
    for at in order * 2:
        others = sum(pick.drafts for pick in picks) - picks[at].drafts
        tokens = sum(gained) - gained[at]
        logs = sum(map(math.log, gained)) - math.log(gained[at])
        for offer in offers[at]:
            for drafts in (n for n in LENGTHS if n < len(offer.tokens) and n + others <= most):
                tried = [*picks]
                tried[at] = Pick(offer.drafter, drafts)
                ms = step_ms(count + others + drafts) + draft_ms(tried)
                value = logs + math.log(offer.tokens[drafts]) - count * math.log(ms)
                if value > best and (tokens + offer.tokens[drafts]) * plain_ms >= count * ms:
                    best, picks, gained[at] = value, tried, offer.tokens[drafts]
    return picks if best - plain >= _LEAST_GAIN else [Pick()] * count
