"""Speculation statistics: acceptance rates for drafters, and gains for users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from localgen.backends.types import SpeculationStats

# decay of old observations per new one; faster for one sequence, because its text changes
_SEQUENCE_DECAY, _SHARED_DECAY, _RECENT_DECAY = 0.98, 0.995, 0.98


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
class SequenceDraftStats:
    """Gains of one sequence. ms: time of its steps. plain_ms: of plain steps for as many tokens."""

    steps: int = 0
    drafting_steps: int = 0
    ms: float = 0.0
    plain_ms: float = 0.0
    tokens_by_drafter: Counter[str] = field(default_factory=Counter)

    def add(self, drafts: int, ms: float, plain_ms: float) -> None:
        """Record a step."""
        self.steps += 1
        self.drafting_steps += drafts > 0
        self.ms += ms
        self.plain_ms += plain_ms


@dataclass(frozen=True, slots=True)
class RequestDraftStats:
    """Speculation statistics of one request, as in Timings."""

    steps: int = 0
    speedup: float = 0.0
    reason: str = ""
    drafters: tuple[str, ...] = ()


class SpeculationRecorder:
    """Decaying sums over recent steps, and totals since the engine started."""

    def __init__(self) -> None:
        self._recent = [0.0] * 8
        self._drafting_steps = self._drafts = self._accepted = 0

    def record(self, sequences: int, tokens: int, drafts: int, ms: float, plain_ms: float) -> None:
        """Record a finished step. plain_ms: time of plain steps for as many tokens."""
        accepted = tokens - sequences
        new = (1.0, drafts > 0, drafts, accepted, sequences, tokens, ms, plain_ms)
        pairs = zip(self._recent, new, strict=True)
        self._recent = [_RECENT_DECAY * old + value for old, value in pairs]
        self._drafting_steps += drafts > 0
        self._drafts += drafts
        self._accepted += accepted

    def stats(self, drafters: tuple[str, ...], reason: str) -> SpeculationStats:
        """For /v1/stats. reason: why the latest step had no drafts."""
        steps, drafting, drafts, accepted, sequences, tokens, ms, plain_ms = self._recent
        share = drafting / steps if steps else 0.0
        return SpeculationStats(
            drafters=drafters,
            share=share,
            reason="" if share >= 0.5 else reason,
            acceptance=accepted / drafts if drafts else 0.0,
            tokens_per_step=tokens / sequences if sequences else 0.0,
            speedup=plain_ms / ms if ms else 0.0,
            drafting_steps_total=self._drafting_steps,
            draft_tokens_total=self._drafts,
            accepted_tokens_total=self._accepted,
        )
