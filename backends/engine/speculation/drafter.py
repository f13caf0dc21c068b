"""Drafter: proposes how sequences continue, and estimates how often it is right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf
from typing import Any

from localgen.backends.runner.sequence import Sequence

# decay of old observations per new one; faster for one sequence, because its text changes
_SEQUENCE_DECAY, _SHARED_DECAY = 0.98, 0.995


class DecayedRatio:
    """A ratio of two sums, of which earlier terms weigh less with each new one.

    prior: initial value, as if `weight` terms of it had been added.
    """

    def __init__(
        self, prior: float = 0.0, weight: float = 0.0, *, decay: float = _SHARED_DECAY
    ) -> None:
        self.numerator, self.weight, self._decay = weight * prior, weight, decay

    def add(self, numerator: float, denominator: float = 1.0) -> None:
        """Add a term to each sum."""
        self.numerator = self._decay * self.numerator + numerator
        self.weight = self._decay * self.weight + denominator

    @property
    def value(self) -> float:
        """The ratio; 0 without terms."""
        return self.numerator / (self.weight or inf)


class SequenceAcceptance:
    """Acceptance rate of one sequence's drafts.

    shared: the rate of all sequences, a prior that weighs as much as `weight` drafts.
    """

    def __init__(self, shared: DecayedRatio, weight: float = 6.0) -> None:
        self._shared, self._weight = shared, weight
        self._own = DecayedRatio(decay=_SEQUENCE_DECAY)

    def add(self, is_accepted: bool) -> None:
        """Record one draft, verified or hypothetical."""
        self._own.add(is_accepted)
        self._shared.add(is_accepted)

    @property
    def probability(self) -> float:
        """The acceptance probability of the next draft."""
        own, prior = self._own, self._shared.value
        return (own.numerator + self._weight * prior) / (own.weight + self._weight)


@dataclass(frozen=True, slots=True, eq=False)
class DraftProposal:
    """Draft tokens of one sequence. draft_probs: the distribution of each, as in Chunk."""

    tokens: list[int] = field(default_factory=list)
    draft_probs: list[Any] = field(default_factory=list)

    def shortened(self, count: int) -> DraftProposal:
        """The first `count` draft tokens, at most."""
        return DraftProposal(self.tokens[:count], self.draft_probs[:count])


class Drafter(ABC):
    """Called by the engine thread before a step, acceptance_probs for all sequences first.

    failure: why it is disabled. needs_probing: only verified drafts show its acceptance.
    """

    name = failure = ""
    needs_probing = False

    @abstractmethod
    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> Seq[float]:
        """Return the acceptance probability of each next draft, given that those before it are
        accepted; empty: no drafts."""

    @abstractmethod
    def propose(
        self, requests: Mapping[Sequence, int], max_prefill_tokens: int
    ) -> dict[Sequence, DraftProposal]:
        """Propose up to the requested number of drafts for each sequence; leave out those without.

        A drafter that first has to prefill one of them does that, up to max_prefill_tokens; until
        all are prefilled, it proposes nothing.
        """

    @abstractmethod
    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        """Learn from new_tokens, which are now at the end of seq, drafted or not."""

    def draft_ms(self) -> float:
        """Milliseconds of one drafting round, one draft for each sequence; 0: unknown or none."""
        return 0.0

    def prepare_while_idle(self) -> bool:
        """See AsyncRunner.prepare_while_idle."""
        return False

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that has ended or was preempted."""
        return

    def close(self) -> None:
        """Free everything. No call may follow."""
        return
