"""Drafter: proposes how sequences continue, and estimates how often it is right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from localgen.backends.runner.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class DraftProposal:
    """Draft tokens of one sequence. draft_probs: what each was sampled from, as in Chunk."""

    tokens: list[int]
    draft_probs: Seq[Any] = ()


class Drafter(ABC):
    """Called between steps by the engine's thread. failure: why it no longer drafts.

    needs_probing: acceptance is known only from drafts that were verified.
    """

    name = failure = ""
    needs_probing = False

    @abstractmethod
    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> Seq[float]:
        """Of each of the next drafts, if those before it are accepted. Empty: no drafts."""

    @abstractmethod
    def propose(self, requests: Seq[tuple[Sequence, int]]) -> list[DraftProposal]:
        """At most that many drafts for each sequence."""

    @abstractmethod
    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        """Learn from new_tokens, which are now at the end of seq, drafted or not."""

    def draft_ms(self) -> float:
        """Of one more draft for all sequences at once; 0: unknown or negligible."""
        return 0.0

    def prefill_acceptance(self) -> float:
        """Expected acceptance where the prompt must be prefilled first; 0: nowhere."""
        return 0.0

    def prefill(self, max_tokens: int) -> None:
        """Prefill up to max_tokens of one such prompt."""
        return

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that has ended or was preempted."""
        return

    def close(self) -> None:
        """Free everything. No call may follow."""
        return
