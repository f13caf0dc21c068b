"""One pool of cells for all sequences: whoever needs room finds it, a shared prefix is stored once.

Cells are counted here with ids and reference counts of our own, because llama.cpp does not
tell: a cell shared by several lanes counts once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localgen.backends.llamacpp.native import Context
from localgen.backends.llamacpp.slots import Lane, Reuse, longest_prefix
from localgen.backends.runner.interface import NoRoom, PoolUsage
from localgen.backends.runner.sequence import Sequence

# A step looks at every cell in use, its own or not: 3,900 foreign cells were measured to make a
# token 8 % dearer (1.2 B parameters on two cores). So the newest prefixes stay whatever their
# length, the others as long as they are short together.
ALWAYS_KEPT = 4
MAX_KEPT_TOKENS = 2048

Cells = NDArray[np.int32]
_NONE: Cells = np.empty(0, np.int32)
# a donor is shortened by at least this much when room is needed, so that one call buys many steps
TRIM_TOKENS = 64


class CellLane(Lane):
    """A lane with the ids of the cells it may use, computed or reserved."""

    cells: Cells = _NONE


class SharedCells:
    """Lanes over a unified context: `max_seqs` running at most, `max_donors` kept beside them."""

    def __init__(
        self, context: Context, *, max_seqs: int, max_donors: int, share: bool, reuse: Reuse
    ) -> None:
        self._context = context
        self._share = share
        self._reuse = reuse
        self._max_donors = max_donors
        self._free_lanes = [CellLane(index) for index in reversed(range(max_seqs + max_donors))]
        self._running: dict[Sequence, CellLane] = {}
        self._donors: list[CellLane] = []
        self._refs = np.zeros(context.kv_tokens, np.int32)
        self._free_cells = np.arange(context.kv_tokens, dtype=np.int32)
        self._num_free = context.kv_tokens
        self._clock = itertools.count(1)

    def index(self, seq: Sequence) -> int:
        """As Lanes.index."""
        return self._running[seq].index

    def usage(self) -> PoolUsage:
        """As ModelRunner.usage; a cell of a running sequence and a donor counts as used."""
        total, used = len(self._refs), self._held(lane.cells for lane in self._running.values())
        return PoolUsage(used=used, cached=total - self._num_free - used, free=self._num_free)

    def _held(self, parts: Iterable[Cells]) -> int:
        """How many different cells these are."""
        held = np.zeros(len(self._refs), np.bool_)
        for cells in parts:
            held[cells] = True
        return int(np.count_nonzero(held))

    # -- room -------------------------------------------------------------------------------

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """As ModelRunner.admit."""
        candidates = (*self._running.values(), *self._donors) if self._share else ()
        donor, known = longest_prefix(seq, candidates)
        length = self._reuse.length(known, len(seq.tokens))
        needed = len(seq.tokens) - length
        if not self._reclaimable(needed + spare, protect=donor, length=length):
            raise NoRoom
        if donor in self._donors and not self._reclaimable(needed + spare, protect=donor):
            self._shorten(donor, length)  # what follows the shared part is in the way
        self._reclaim(needed + spare, protect=donor)
        lane = self._take_lane(donor, known, length)
        lane.owner, lane.kept = seq, []
        self._running[seq] = lane
        self._extend(lane, needed)
        return length

    def _take_lane(self, donor: CellLane | None, known: int, length: int) -> CellLane:
        """A lane that holds `length` tokens of a prompt of which the donor has `known`."""
        if donor and not donor.owner and len(donor.kept) <= known:
            self._donors.remove(donor)  # all of it is wanted: it can simply go on
            self._cut(donor, length)
            return donor
        lane = self._free_lanes.pop()  # fewer than max_seqs run, at most max_donors are kept
        if donor:
            self._context.copy_prefix(donor.index, lane.index, length)
            lane.cells = donor.cells[:length].copy()
            self._refs[lane.cells] += 1
        return lane

    def grow(self, seq: Sequence, n: int) -> bool:
        """As ModelRunner.grow."""
        lane = self._running[seq]
        needed = seq.num_computed + n - len(lane.cells)
        if needed <= 0:
            return True
        if not self._reclaim(needed, protect=None):
            return False
        self._extend(lane, needed)
        return True

    def rewind(self, seq: Sequence, length: int) -> None:
        """As ModelRunner.rewind."""
        self._cut(self._running[seq], length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """As ModelRunner.release."""
        lane = self._running.pop(seq)
        lane.kept, lane.owner = lane.tokens if keep and self._share else [], None
        self._cut(lane, len(lane.kept))
        if not lane.kept:
            self._free_lanes.append(lane)
            return
        self._drop_prefixes_of(lane)
        lane.used_at = next(self._clock)
        self._donors.append(lane)
        while self._keeps_too_much():
            self._drop(self._oldest(None))

    def arrange(self) -> None:
        """As Lanes.arrange; here any order will do."""

    def _keeps_too_much(self) -> bool:
        if len(self._donors) > self._max_donors:
            return True
        tokens = sum(len(donor.kept) for donor in self._donors)
        return tokens > MAX_KEPT_TOKENS and len(self._donors) > ALWAYS_KEPT

    def _drop_prefixes_of(self, lane: CellLane) -> None:
        """Donors that are the beginning of this one serve nobody any more."""
        for donor in list(self._donors):
            if donor.kept == lane.kept[: len(donor.kept)]:
                self._drop(donor)

    # -- donors -----------------------------------------------------------------------------

    def _oldest(self, protect: CellLane | None) -> CellLane:
        return min((d for d in self._donors if d is not protect), key=lambda d: d.used_at)

    def _shorten(self, donor: CellLane, length: int) -> None:
        donor.kept = donor.kept[:length]
        self._cut(donor, length)

    def _drop(self, donor: CellLane) -> None:
        self._donors.remove(donor)
        donor.kept = []
        self._cut(donor, 0)
        self._free_lanes.append(donor)

    def _reclaimable(
        self, needed: int, *, protect: CellLane | None, length: int | None = None
    ) -> bool:
        """Whether dropping donors could free that many cells; drops none.

        length: how much of the protected donor must stay; None: all of it.
        """
        if self._num_free >= needed:
            return True
        held = [lane.cells for lane in self._running.values()]
        if protect:
            held.append(protect.cells[:length])
        return len(self._refs) - self._held(held) >= needed

    def _reclaim(self, needed: int, *, protect: CellLane | None) -> bool:
        """Free that many cells at the expense of donors, least recently used first."""
        while self._num_free < needed and any(d is not protect for d in self._donors):
            donor = self._oldest(protect)
            keep = len(donor.kept) - max(needed - self._num_free, TRIM_TOKENS)
            if keep > 0:
                self._shorten(donor, keep)
            else:
                self._drop(donor)
        return self._num_free >= needed

    # -- cells ------------------------------------------------------------------------------

    def _extend(self, lane: CellLane, n: int) -> None:
        assert n <= self._num_free, (n, self._num_free)
        taken = self._free_cells[self._num_free - n : self._num_free].copy()
        self._num_free -= n
        self._refs[taken] = 1
        lane.cells = np.concatenate((lane.cells, taken))

    def _cut(self, lane: CellLane, length: int) -> None:
        """Give back the cells beyond `length`, in llama.cpp and here."""
        dropped = lane.cells[length:]
        if not len(dropped):
            return
        cut = self._context.cut(lane.index, length)
        assert cut, "a partial cut was asked of a model that cannot rewind"
        lane.cells = lane.cells[:length].copy()
        self._refs[dropped] -= 1
        freed = dropped[self._refs[dropped] == 0]
        self._free_cells[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def check(self) -> None:
        """As Lanes.check."""
        refs: NDArray[Any] = np.zeros_like(self._refs)
        for lane in (*self._running.values(), *self._donors):
            refs[lane.cells] += 1
            length = len(lane.tokens)
            assert length <= len(lane.cells)
            assert self._context.last_position(lane.index) == length - 1
        assert (refs == self._refs).all()
        assert sorted(self._free_cells[: self._num_free]) == np.flatnonzero(refs == 0).tolist()
        for lane in self._free_lanes:
            assert len(lane.cells) == 0
            assert self._context.last_position(lane.index) == -1
