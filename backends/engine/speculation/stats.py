"""Speculation statistics: acceptance rates for drafters, and gains for users."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from localgen.backends.types import SpeculationStats

# decay of old observations per new one; faster for one sequence, because its text changes
_SEQUENCE_DECAY, _SHARED_DECAY = 0.98, 0.995


class AcceptanceRate:
    """Ratio of accepted to proposed drafts. prior: initial value, weighted like `weight` drafts."""

    def __init__(self, prior: float = 0.0, weight: float = 2.0) -> None:
        self.accepted, self.proposed = weight * prior, weight

    def add(self, is_accepted: bool, decay: float) -> None:
        """Record one draft."""
        self.accepted = decay * self.accepted + is_accepted
        self.proposed = decay * self.proposed + 1.0


class AcceptanceEstimator:
    """Acceptance rate of one sequence by bucket.

    shared: rates of all sequences, used as a prior that weighs as much as `weight` drafts.
    """

    def __init__(self, shared: Seq[AcceptanceRate], *, weight: float = 6.0) -> None:
        self._shared, self._weight = shared, weight
        self._own: dict[int, AcceptanceRate] = {}

    def add(self, bucket: int, is_accepted: bool) -> None:
        """Record one draft, verified or hypothetical."""
        own = self._own.setdefault(bucket, AcceptanceRate(weight=0.0))
        own.add(is_accepted, _SEQUENCE_DECAY)
        self._shared[bucket].add(is_accepted, _SHARED_DECAY)

    def probability(self, bucket: int) -> float:
        """Return the acceptance probability of the next draft in this bucket."""
        shared, own = self._shared[bucket], self._own.get(bucket)
        prior = shared.accepted / shared.proposed
        if own is None:
            return prior
        return (own.accepted + self._weight * prior) / (own.proposed + self._weight)


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


def speculation_stats(
    recent: StepTotals, total: StepTotals, drafters: tuple[str, ...], reason: str
) -> SpeculationStats:
    """For /v1/stats. total: since the engine started. reason: why the latest step had no drafts."""
    share = recent.drafting_steps / max(1.0, recent.steps)
    return SpeculationStats(
        drafters=drafters,
        share=share,
        reason="" if share >= 0.5 else reason,
        acceptance=(recent.tokens - recent.sequences) / recent.drafts if recent.drafts else 0.0,
        tokens_per_step=recent.tokens / recent.sequences if recent.sequences else 0.0,
        speedup=recent.plain_ms / recent.ms if recent.ms else 0.0,
        drafting_steps_total=int(total.drafting_steps),
        draft_tokens_total=int(total.drafts),
        accepted_tokens_total=int(total.tokens - total.sequences),
    )
