"""What has become of drafts: recently, and of one sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from localgen.backends.types import SpeculationStats

_DECAY = 0.98


@dataclass(slots=True)
class RecentDraftStats:
    """Sums over recent steps, old ones fading.

    drafting_steps: steps with drafts. drafts, accepted: tokens. plain_ms: what plain steps would
    have taken for the same tokens.
    """

    steps: float = 0.0
    drafting_steps: float = 0.0
    drafts: float = 0.0
    accepted: float = 0.0
    sequences: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0
    plain_ms: float = 0.0

    @property
    def speedup(self) -> float:
        """Against plain steps; 0: there was none."""
        return _ratio(self.plain_ms, self.ms)

    def add(
        self, *, drafts: int, accepted: int, sequences: int, tokens: int, ms: float, plain_ms: float
    ) -> None:
        """Enter a step."""
        self._decay(1)
        self.steps += 1
        self.drafting_steps += drafts > 0
        self.drafts += drafts
        self.accepted += accepted
        self.sequences += sequences
        self.tokens += tokens
        self.ms += ms
        self.plain_ms += plain_ms

    def add_plain(self, steps: int, sequences: int, ms: float) -> None:
        """Enter so many steps without drafts, which took so long."""
        self._decay(steps)
        left = (1 - _DECAY**steps) / (1 - _DECAY)  # of so many, the first of them faded
        self.steps += left
        self.sequences += left * sequences
        self.tokens += left * sequences
        self.ms += left * ms / steps
        self.plain_ms += left * ms / steps

    def _decay(self, steps: int) -> None:
        kept = _DECAY**steps
        self.steps *= kept
        self.drafting_steps *= kept
        self.drafts *= kept
        self.accepted *= kept
        self.sequences *= kept
        self.tokens *= kept
        self.ms *= kept
        self.plain_ms *= kept


@dataclass(slots=True)
class DraftTotals:
    """Since the engine started: steps with drafts, tokens that were proposed and kept."""

    steps: int = 0
    drafts: int = 0
    accepted: int = 0


@dataclass(slots=True)
class SequenceDraftStats:
    """What one sequence has had of it: its steps, and those with drafts for it.

    ms: of steps in which all were decoding; plain_ms: of plain ones for the same tokens.
    tokens_by_drafter: tokens that each drafter proposed.
    """

    steps: int = 0
    drafting_steps: int = 0
    ms: float = 0.0
    plain_ms: float = 0.0
    tokens_by_drafter: Counter[str] = field(default_factory=Counter)

    def add_plain(self, steps: int, ms: float) -> None:
        """Enter so many steps without drafts, which took so long."""
        self.steps += steps
        self.ms += ms
        self.plain_ms += ms


@dataclass(frozen=True, slots=True)
class RequestDraftStats:
    """As Timings has it of one request."""

    steps: int = 0
    speedup: float = 0.0
    reason: str = ""
    drafters: tuple[str, ...] = ()


NO_DRAFT_STATS = RequestDraftStats()


def speculation_stats(
    drafters: tuple[str, ...], reason: str, recent: RecentDraftStats, totals: DraftTotals
) -> SpeculationStats:
    """As users see it. drafters: their names. reason: why there were no drafts the last time."""
    share = _ratio(recent.drafting_steps, recent.steps)
    return SpeculationStats(
        drafters=drafters,
        share=share,
        reason="" if share >= 0.5 else reason,
        acceptance=_ratio(recent.accepted, recent.drafts),
        tokens_per_step=_ratio(recent.tokens, recent.sequences),
        speedup=recent.speedup,
        drafting_steps_total=totals.steps,
        draft_tokens_total=totals.drafts,
        accepted_tokens_total=totals.accepted,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
