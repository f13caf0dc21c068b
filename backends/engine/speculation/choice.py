"""How many drafts each sequence gets in the next step, so that tokens come fastest."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

# what is gained, in the logarithm, has to be more than the noise of what is known, of one sequence
# and of each one more: what a step takes is known no better
_LEAST_GAIN, _NOISE = math.log(1.02), math.log(1.01)
# nobody's tokens come at less than this of the rate that they would come at without drafts
_FAIR = 0.95
# drafts that are right less often than this, those before them counted in, are not worth a thought
_NO_CHANCE = 1e-5
# steps of up to so many tokens may be of any size, larger ones fill tiles of these
_ANY_SIZE, _SMALL_TILE, _TILED, _TILE = 8, 4, 32, 16
# a larger step is never cheaper than a smaller one by more than this, whatever was measured
_CHEAPER = 0.8


@dataclass(frozen=True, slots=True)
class DraftOption:
    """What a drafter could propose for one sequence.

    tokens[k]: expected tokens of a step with k drafts, the one after them included.
    """

    drafter: int
    tokens: tuple[float, ...]

    @classmethod
    def of(cls, drafter: int, chances: Seq[float]) -> DraftOption:
        """The expectation that follows from each draft's chance, those before it being right."""
        expected, reached = [1.0], 1.0
        for chance in chances:
            reached *= chance
            if reached < _NO_CHANCE:
                break
            expected.append(expected[-1] + reached)
        return cls(drafter, tuple(expected))

    def upto(self, drafts: int) -> float:
        """Expected tokens with so many drafts, or all that there are."""
        return self.tokens[min(drafts, len(self.tokens) - 1)]

    def more(self, drafts: int) -> float:
        """What one draft more than so many multiplies the expectation by, in the logarithm."""
        return math.log(self.tokens[drafts + 1] / self.tokens[drafts])


@dataclass(frozen=True, slots=True)
class DraftAllocation:
    """So many drafts by this drafter; 0: none."""

    drafter: int = 0
    drafts: int = 0


# of a step with so many tokens
StepMs = Callable[[int], float]
# of one draft more by this drafter for so many sequences at once
DraftMs = Callable[[int, int], float]


def allocate_drafts(
    offers: Seq[Seq[DraftOption]], step_ms: StepMs, draft_ms: DraftMs, *, most: int
) -> list[DraftAllocation]:
    """A pick for each sequence, from what is offered to it; times are milliseconds.

    most: drafts in one step. What grows is the product of all sequences' tokens/s. Their sum does
    not shrink, and nobody pays more than a little for another. Drafts are given out one by one,
    each to whom it helps most, as long as there are any; of the ways on that path the best is
    taken. Each draft is worth less than the one before it, so no other way to give out as many is
    better, but for what a drafter saves by drafting for several at once.
    """
    count = len(offers)
    plain_ms = step_ms(count)
    if not plain_ms:
        return [DraftAllocation()] * count
    taken = [_alone(offered, count, step_ms, draft_ms, most) for offered in offers]
    path = _Path(taken, draft_ms)
    best, length = _LEAST_GAIN + (count - 1) * _NOISE, 0
    while path.length < most and path.advance():
        if not (path.is_at_end or path.length == most or _fills_tiles(count + path.length)):
            continue
        stretch = (step_ms(count + path.length) + path.drafting_ms) / plain_ms
        value = path.gain - count * math.log(stretch)
        if value > best and path.tokens >= count * stretch and path.least >= _FAIR * stretch:
            best, length = value, path.length
        if path.most_gain - count * math.log(max(1.0, _CHEAPER * stretch)) < best:
            break
    return path.picks(length)


def _fills_tiles(tokens: int) -> bool:
    """Whether a step of this size is worth a try: processors compute tiles of tokens, and sizes
    that are tried must not be too many to be known."""
    if tokens <= _ANY_SIZE:
        return True
    return tokens % (_SMALL_TILE if tokens <= _TILED else _TILE) == 0


def pays(offer: DraftOption, step_ms: StepMs, draft_ms: DraftMs, *, most: int) -> bool:
    """Whether a sequence on its own would draft by it."""
    plain_ms = step_ms(1)
    if not plain_ms:
        return False
    return math.log(plain_ms * _rate(offer, 1, step_ms, draft_ms, most)) > _LEAST_GAIN


def _rate(offer: DraftOption, count: int, step_ms: StepMs, draft_ms: DraftMs, most: int) -> float:
    """Tokens of one of so many sequences, for each millisecond, if nobody else drafts."""
    each_ms = draft_ms(offer.drafter, 1)
    return max(
        tokens / (step_ms(count + drafts) + drafts * each_ms)
        for drafts, tokens in enumerate(offer.tokens[: most + 1])
    )


def _alone(
    offered: Seq[DraftOption], count: int, step_ms: StepMs, draft_ms: DraftMs, most: int
) -> DraftOption | None:
    """The offer that is worth most if nobody else drafts."""
    if len(offered) < 2:
        return offered[0] if offered else None
    return max(offered, key=lambda offer: _rate(offer, count, step_ms, draft_ms, most))


class _Path:
    """Drafts given out one after the other.

    length: how many so far. gain: of all, in the logarithm. most_gain: with all that is offered.
    tokens: expected, of all.
    """

    def __init__(self, offers: Seq[DraftOption | None], draft_ms: DraftMs) -> None:
        self._offers, self._draft_ms = offers, draft_ms
        self._drafts = [0] * len(offers)
        # by drafter: sequences that have a first draft, a second one and so on
        self._given: dict[int, list[int]] = {offer.drafter: [] for offer in offers if offer}
        self._order: list[int] = []
        self.length, self.gain = 0, 0.0
        self.tokens = float(len(offers))
        self.most_gain = sum(math.log(offer.tokens[-1]) for offer in offers if offer)
        self._next = [
            (-offer.more(0), at) for at, offer in enumerate(offers) if offer and offer.tokens[1:]
        ]
        heapq.heapify(self._next)

    @property
    def is_at_end(self) -> bool:
        """Whether all that is offered is given out."""
        return not self._next

    @property
    def least(self) -> float:
        """What whoever has least may expect."""
        return min(
            offer.tokens[drafts] if offer else 1.0
            for offer, drafts in zip(self._offers, self._drafts, strict=True)
        )

    @property
    def drafting_ms(self) -> float:
        """What proposing them takes: each drafter's first ones at once, then the second ones."""
        return sum(
            times * self._draft_ms(drafter, sequences)
            for drafter, given in self._given.items()
            if self._draft_ms(drafter, 1)
            for sequences, times in Counter(given).items()
        )

    def advance(self) -> bool:
        """One draft more; False: nobody is offered more."""
        if not self._next:
            return False
        gain, at = self._next[0]
        offer, drafts = self._offers[at], self._drafts[at]
        assert offer
        self._drafts[at] = drafts + 1
        self._order.append(at)
        self.length += 1
        self.gain -= gain
        self.tokens += offer.tokens[drafts + 1] - offer.tokens[drafts]
        given = self._given[offer.drafter]
        if drafts < len(given):
            given[drafts] += 1
        else:
            given.append(1)
        if drafts + 2 < len(offer.tokens):
            heapq.heapreplace(self._next, (-offer.more(drafts + 1), at))
        else:
            heapq.heappop(self._next)
        return True

    def picks(self, length: int) -> list[DraftAllocation]:
        """The picks when so many drafts were given out."""
        given = Counter(self._order[:length])
        return [
            DraftAllocation(offer.drafter, given[at]) if offer and given[at] else DraftAllocation()
            for at, offer in enumerate(self._offers)
        ]
