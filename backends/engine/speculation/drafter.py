"""Who proposes tokens, and how sure one may be of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from localgen.backends.runner.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class DraftProposal:
    """How a sequence may go on. draft_probs: what each token was drawn from, as Chunk has it;
    empty: they are points."""

    tokens: list[int]
    draft_probs: Seq[Any] = ()


class Drafter(Protocol):
    """Proposes how sequences go on, one way for each. Called between steps, by the engine's thread.

    name: as users know it. needs_probing: whether trying alone tells how often it is right; else it
    knows without.
    """

    name: str
    needs_probing: bool

    @property
    def failure(self) -> str:
        """Why it proposes no more; empty: it works."""
        ...

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> Seq[float]:
        """How often each of the next drafts would be right, those before it being right; at most
        `max_drafts` of them. Empty: there is nothing to propose."""
        ...

    def draft_ms(self, num_sequences: int) -> float:
        """About what one draft takes, for so many sequences at once."""
        ...

    def default_acceptance(self) -> float:
        """How often a draft is right for a sequence of which nothing else is known; 0: there is
        nothing to prepare for."""
        ...

    def prefill(self, budget_ms: float) -> None:
        """Prepare for sequences that cannot be drafted for yet; that long, in the mean of several
        calls. Called once a step in which drafts are looked for."""
        ...

    def propose(self, requests: Seq[tuple[Sequence, int]]) -> list[DraftProposal]:
        """That many drafts for each sequence, or fewer."""
        ...

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        """The sequence has gone on with these, whether they were drafts in a step or not."""
        ...

    def release(self, seq: Sequence) -> None:
        """The sequence has ended or lost its place."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
