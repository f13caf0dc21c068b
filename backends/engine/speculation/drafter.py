"""Drafter: proposes how sequences continue, and estimates how often it is right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf
from typing import Any, Self

from localgen.backends.runner.sequence import Sequence

# weight of all sequences' acceptance in the estimate for one, in drafts
_SHARED_WEIGHT = 8.0


class DecayedRatio:
    """A ratio of two sums, of which earlier terms weigh less with each new one.

    prior: initial value, as if `weight` terms of it had been added. shared: ratio over all
    sequences, which gets each term as well, and is a prior that does not decay. decay: of earlier
    terms, per new one.
    """

    RECENT = 0.98  # decay for recent steps, and for one sequence, whose text changes

    def __init__(
        self, prior: float = 0, weight: float = 0, decay: float = 0.995, shared: Self | None = None
    ) -> None:
        self.numerator, self.weight = weight * prior, weight
        self._shared, self._decay = shared, decay

    def add(self, numerator: float, denominator: float = 1.0) -> None:
        """Add a term to each sum."""
        self.numerator = self._decay * self.numerator + numerator
        self.weight = self._decay * self.weight + denominator
        if self._shared:
            self._shared.add(numerator, denominator)

    @property
    def value(self) -> float:
        """The ratio; 0 without terms."""
        prior, weight = (self._shared.value, _SHARED_WEIGHT) if self._shared else (0.0, 0.0)
        return (self.numerator + weight * prior) / (self.weight + weight or inf)


@dataclass(frozen=True, slots=True, eq=False)
class DraftProposal:
    """Draft tokens of one sequence. draft_probs: the distribution of each, as in Chunk."""

    tokens: list[int] = field(default_factory=list)
    draft_probs: list[Any] = field(default_factory=list)


class Drafter(ABC):
    """Called by the engine thread before a step, acceptance_probs for all sequences first.

    failure: why it is disabled. needs_probing: only verified drafts show its acceptance.
    """

    name = failure = ""
    needs_probing = False

    @abstractmethod
    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> Seq[float]:
        """Return the acceptance probability of each next draft, given that those before it are
        accepted, or empty for no drafts."""

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
        """Milliseconds of one drafting round for all sequences. 0 if it is unknown or free."""
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
