"""Flips and KL divergence of one side from its reference, token by token."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localgen.quant.intervals import ratio_interval
from localgen.quant.request.losses import Interval

# tokens before a flip that are shown
_CONTEXT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Flip:
    """A position where the two sides choose another token.

    tokens: the ones before it. ours, theirs: the choices of the audited side and of the reference.
    probabilities: of ours and theirs, by the audited side and by the reference.
    """

    text: str
    tokens: tuple[int, ...]
    actual: int
    ours: int
    theirs: int
    kl: float
    ours_by_audited: float
    theirs_by_audited: float
    ours_by_reference: float
    theirs_by_reference: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Figures of one side. flips: share of the tokens whose most likely one differs, 0 to 1.

    kl: mean of KL(reference || audited) in nats. Intervals are None for fewer than eight texts.
    """

    side: str
    tokens: int
    texts: int
    flips: float
    flips_interval: Interval | None
    kl: float
    kl_interval: Interval | None


@dataclass(slots=True)
class Tally:
    """Sums of one side, by text. num_worst: flips to keep, those with the largest KL."""

    side: str
    num_worst: int
    _flips: list[float] = field(default_factory=list)
    _kl: list[float] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _worst: list[tuple[float, int, Flip]] = field(default_factory=list)

    def begin_text(self) -> None:
        self._flips.append(0)
        self._kl.append(0.0)
        self._tokens.append(0)

    def add(
        self,
        text: str,
        tokens: Sequence[int],
        at: int,
        reference: NDArray[np.float64],
        audited: NDArray[np.float64],
    ) -> None:
        """Add positions. tokens: of the whole text. at: the first scored token of these rows.

        reference, audited: log probabilities [rows, vocab].
        """
        kl = (np.exp(reference) * (reference - audited)).sum(-1)
        theirs, ours = reference.argmax(-1), audited.argmax(-1)
        flipped = np.flatnonzero(theirs != ours)
        self._flips[-1] += len(flipped)
        self._kl[-1] += float(kl.sum())
        self._tokens[-1] += len(kl)
        for row in flipped.tolist():
            first, second = int(ours[row]), int(theirs[row])
            place = at + row
            self._keep(
                Flip(
                    text,
                    tuple(tokens[max(0, place - _CONTEXT_TOKENS) : place]),
                    tokens[place],
                    first,
                    second,
                    float(kl[row]),
                    *np.exp([audited[row, [first, second]], reference[row, [first, second]]])
                    .flatten()
                    .tolist(),
                )
            )

    def _keep(self, flip: Flip) -> None:
        # the count breaks ties, as flips have no order
        entry = (flip.kl, -sum(self._tokens) - len(self._worst), flip)
        if len(self._worst) < self.num_worst:
            heapq.heappush(self._worst, entry)
        elif self._worst and entry[:2] > self._worst[0][:2]:
            heapq.heapreplace(self._worst, entry)

    @property
    def worst(self) -> list[Flip]:
        """The flips with the largest KL, the largest first."""
        return [flip for _, _, flip in sorted(self._worst, key=lambda one: -one[0])]

    def agreement(self) -> Agreement:
        count = sum(self._tokens)
        return Agreement(
            self.side,
            count,
            len(self._tokens),
            sum(self._flips) / count,
            ratio_interval(self._flips, self._tokens),
            sum(self._kl) / count,
            ratio_interval(self._kl, self._tokens),
        )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log probabilities [rows, vocab]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted
