"""The sequences that have been admitted: their order, and which of them may compute in a step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from operator import attrgetter

from localgen.backends.engine.adapter_turns import AdapterTurns
from localgen.backends.engine.background import is_background, rows_beside
from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.runner.sequence import Sequence

has_drafts = attrgetter("drafts")


class RunningSequences:
    """Iterated, sized: highest priority first, then oldest; the last is preempted first.

    Those in the background come last: while others run, they compute only where it pays.
    prefilling: those with more to compute than their last generated token.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._in_order: list[Sequence] = []
        self.prefilling: set[Sequence] = set()
        # of the foreground, which is first in order, and of the background, which waits for it
        self._turns = AdapterTurns(), AdapterTurns()

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._in_order)

    @property
    def last(self) -> Sequence:
        """The first to be preempted. Raises IndexError if there is none."""
        return self._in_order[-1]

    def get(self, request_id: str) -> Sequence | None:
        """Return the sequence with this id, or None."""
        return self._by_id.get(request_id)

    def add(self, seq: Sequence) -> None:
        """A sequence was admitted."""
        self._by_id[seq.id] = seq
        insort(self._in_order, seq, key=lambda s: (-s.priority, s.arrived_s))
        self._turns[is_background(seq)].add(seq)
        if not seq.is_decoding or seq.first_token_s is None:
            self.prefilling.add(seq)

    def remove(self, seq: Sequence) -> None:
        """A sequence ended or was preempted."""
        del self._by_id[seq.id]
        self._in_order.remove(seq)
        self._turns[is_background(seq)].remove(seq)
        self.prefilling.discard(seq)

    @property
    def foreground(self) -> list[Sequence]:
        """The sequences that are not in the background."""
        return self._in_order[: self._turns[False].num_seqs]

    @property
    def turns(self) -> AdapterTurns:
        """The turns of the foreground; those of the background if nothing else runs."""
        return self._turns[not self._turns[False].num_seqs]

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences of this turn with only their last generated token left to compute.

        Without those in the background, if others run.
        """
        in_turn = self.turns.select(self.foreground or self._in_order)
        return [seq for seq in in_turn if seq not in self.prefilling]

    @property
    def is_prefilling(self) -> bool:
        """True if a sequence has more to compute than its last generated token.

        Those in the background count only if no others run.
        """
        return not self.prefilling.isdisjoint(self.foreground or self._in_order)

    def active(self, budget: TokenBudget) -> Collection[Sequence]:
        """Those whose turn it is to compute; in the background only if it pays."""
        return self.turns.select(self._active(budget))

    def _active(self, budget: TokenBudget) -> Seq[Sequence]:
        foreground = self.foreground
        if not foreground or len(foreground) == len(self._in_order):
            return self._in_order
        if self.is_prefilling or any(map(has_drafts, foreground)):
            return foreground
        adapters = {seq.adapters for seq in foreground}  # others would need steps of their own
        background = [seq for seq in self._in_order[len(foreground) :] if seq.adapters in adapters]
        decoding = [seq for seq in background if seq not in self.prefilling]
        rows = rows_beside(budget.decode_costs, len(foreground), len(decoding))
        active = [*foreground, *decoding[:rows]]
        for seq in decoding[:rows]:
            seq.drafts, seq.draft_probs = [], ()  # proposed while it was alone
        if rows == len(decoding) and budget.tokens_beside(len(active)):
            active += [seq for seq in background if seq in self.prefilling]
        return active
