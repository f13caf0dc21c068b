"""Who proposes tokens, and how sure one may be of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from localgen.backends.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """How a sequence may go on. drawn_from: what each token was drawn from, as Chunk has it; empty:
    they are points."""

    tokens: list[int]
    drawn_from: Seq[Any] = ()


class Drafter(Protocol):
    """Proposes how sequences go on, one way for each. Called between steps, by the engine's thread.

    name: as users know it.
    """

    name: str

    def chances(self, seq: Sequence, most: int) -> Seq[float]:
        """How often each of the next drafts would be right, those before it being right; at most
        `most` of them. Empty: there is nothing to propose."""
        ...

    def cost_ms(self, lengths: Seq[int]) -> float:
        """About what it takes to propose so many tokens for so many sequences at once."""
        ...

    def catch_up(self, most_ms: float) -> None:
        """Prepare for sequences that cannot be drafted for yet; that long at most, or so."""
        ...

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[Proposal]:
        """That many drafts for each sequence, or fewer."""
        ...

    def learn(self, seq: Sequence, came: Seq[int]) -> None:
        """The sequence has gone on with these, whether they were drafts in a step or not."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended or lost its place."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
