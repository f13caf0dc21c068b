"""Drafter: proposes how sequences continue, and estimates how often it is right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from localgen.backends.runner.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class DraftProposal:
    """Draft tokens of one sequence. draft_probs: the distribution of each, as in Chunk."""

    tokens: list[int]
    draft_probs: Seq[Any] = ()


class Drafter(ABC):
    """Called between steps by the engine thread. failure: why it is disabled.

    needs_probing: its acceptance can only be measured by verifying drafts.
    """

    name = failure = ""
    needs_probing = False

    @abstractmethod
    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> Seq[float]:
        """Return the acceptance probability of each next draft, given that those before it are
        accepted; empty: no drafts."""

    @abstractmethod
    def propose(
        self, requests: Seq[tuple[Sequence, int]], max_prefill_tokens: int
    ) -> list[DraftProposal]:
        """Propose up to the requested number of drafts for each sequence.

        A drafter that first has to prefill a prompt does that instead, at most max_prefill_tokens.
        """

    @abstractmethod
    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        """Learn from new_tokens, which are now at the end of seq, drafted or not."""

    def draft_ms(self) -> float:
        """Milliseconds of one drafting round, one draft for each sequence; 0: unknown or none."""
        return 0.0

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that has ended or was preempted."""
        return

    def close(self) -> None:
        """Free everything. No call may follow."""
        return
