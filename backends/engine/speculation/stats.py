"""Speculation statistics: acceptance rates for drafters, and gains for users."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# decay of old observations per new one; faster for one sequence, because its text changes
_SEQUENCE_DECAY, _SHARED_DECAY = 0.98, 0.995


class AcceptanceRate:
    """Ratio of accepted to proposed drafts. prior: initial value, weighted like `weight` drafts."""

    def __init__(self, prior: float = 0.0, weight: float = 2.0) -> None:
        self.accepted, self.proposed = weight * prior, weight

    def add(self, is_accepted: bool, decay: float = _SHARED_DECAY) -> None:
        """Record one draft."""
        self.accepted = decay * self.accepted + is_accepted
        self.proposed = decay * self.proposed + 1.0


class SequenceAcceptance:
    """Acceptance rate of one sequence.

    shared: the rate of all sequences, a prior that weighs as much as `weight` drafts.
    """

    def __init__(self, shared: AcceptanceRate, weight: float = 6.0) -> None:
        self._shared, self._weight = shared, weight
        self._own = AcceptanceRate(weight=0.0)

    def add(self, is_accepted: bool) -> None:
        """Record one draft, verified or hypothetical."""
        self._own.add(is_accepted, _SEQUENCE_DECAY)
        self._shared.add(is_accepted)

    @property
    def probability(self) -> float:
        """The acceptance probability of the next draft."""
        prior = self._shared.accepted / self._shared.proposed
        return (self._own.accepted + self._weight * prior) / (self._own.proposed + self._weight)


@dataclass(slots=True)
class StepTotals:
    """Sums over decode steps. decay: weight of earlier steps with each new one.

    sequences, tokens: summed over the steps. ms: time. plain_ms: of plain steps for as many tokens.
    """

    decay: float = 1.0
    steps: float = 0.0
    drafting_steps: float = 0.0
    drafts: float = 0.0
    sequences: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0
    plain_ms: float = 0.0
    tokens_by_drafter: Counter[str] = field(default_factory=Counter)

    def add(self, sequences: int, tokens: int, drafts: int, ms: float, plain_ms: float) -> None:
        """Record a step."""
        self.steps = self.decay * self.steps + 1
        self.drafting_steps = self.decay * self.drafting_steps + (drafts > 0)
        self.drafts = self.decay * self.drafts + drafts
        self.sequences = self.decay * self.sequences + sequences
        self.tokens = self.decay * self.tokens + tokens
        self.ms = self.decay * self.ms + ms
        self.plain_ms = self.decay * self.plain_ms + plain_ms


@dataclass(frozen=True, slots=True)
class RequestDraftStats:
    """Speculation statistics of one request, as in Timings."""

    steps: int = 0
    speedup: float = 0.0
    reason: str = ""
    drafters: tuple[str, ...] = ()
