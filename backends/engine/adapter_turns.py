"""Turns of running sequences with different adapters, of which a step can compute only one set."""

from __future__ import annotations

from collections.abc import Collection

from localgen.backends.adapters import Adapters
from localgen.backends.runner.sequence import Sequence

# To change adapters, llama.cpp prepares its graphs again: 4 ms with 6 M parameters, 12 ms with
# 135 M (measured on one core). So a turn lasts for several short steps, or for one long step.
TURN_MS = 50.0


class AdapterTurns:
    """Whose turn it is: that of all sequences, unless they use different adapters.

    num_seqs: running sequences.
    """

    def __init__(self) -> None:
        self._counts: dict[Adapters, int] = {}  # sequences; the first have their turn
        self._used_ms = 0.0
        self.num_seqs = 0

    @property
    def num_sets(self) -> int:
        """Number of different sets of adapters; the empty one counts too."""
        return len(self._counts)

    def add(self, seq: Sequence) -> None:
        """A sequence starts running. Those with new adapters come after all others."""
        self._counts[seq.adapters] = self._counts.get(seq.adapters, 0) + 1
        self.num_seqs += 1

    def remove(self, seq: Sequence) -> None:
        """A sequence stops running."""
        self._counts[seq.adapters] -= 1
        self.num_seqs -= 1
        if not self._counts[seq.adapters]:
            if next(iter(self._counts)) == seq.adapters:
                self._used_ms = 0.0
            del self._counts[seq.adapters]

    def select(self, seqs: Collection[Sequence]) -> Collection[Sequence]:
        """Those of the sequences whose turn it is; the same object if it is that of all."""
        if len(self._counts) < 2:
            return seqs
        adapters = next(iter(self._counts))
        return [seq for seq in seqs if seq.adapters == adapters]

    def end_step(self, step_ms: float) -> None:
        """Count a step; the turn passes after TURN_MS."""
        self._used_ms += step_ms
        if self._used_ms >= TURN_MS:
            self.pass_on()

    def pass_on(self) -> None:
        """Give the turn to those that have waited longest."""
        self._used_ms = 0.0
        if len(self._counts) > 1:
            adapters = next(iter(self._counts))
            self._counts[adapters] = self._counts.pop(adapters)
