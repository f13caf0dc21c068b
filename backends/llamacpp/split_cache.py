"""A part of the cache for each sequence: a step reads only what its own sequences have written.

A kept prefix costs others nothing here, and a shared one is copied, at about a thousandth of
the time that computing it takes. What a sequence does not use of its part nobody else can.
"""

from __future__ import annotations

import itertools

from localgen.backends.llamacpp.native import Context
from localgen.backends.llamacpp.slots import Lane, Reuse, longest_prefix
from localgen.backends.runner.interface import NoRoom, PoolUsage
from localgen.backends.runner.sequence import Sequence

# A donor goes on itself if no more than this, and no more than this share of what is wanted, is
# lost of it. The end of an answer often comes back as other tokens than were sampled, and nobody
# asks for those again.
LOST_TOKENS, LOST_SHARE = 32, 1 / 8


class Streams:
    """Lanes over a context that is not unified; every lane has room for a whole context."""

    def __init__(self, context: Context, *, share: bool, reuse: Reuse) -> None:
        self._context = context
        self._share = share
        self._reuse = reuse
        self._lanes = [Lane(index) for index in range(context.n_seq_max)]
        self._running: dict[Sequence, Lane] = {}
        self._clock = itertools.count(1)

    def index(self, seq: Sequence) -> int:
        """As Lanes.index."""
        return self._running[seq].index

    def usage(self) -> PoolUsage:
        """As ModelRunner.usage."""
        used = sum(seq.num_computed for seq in self._running)
        cached = sum(len(lane.kept) for lane in self._lanes)
        return PoolUsage(used, cached, self._context.kv_tokens - used - cached)

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """As ModelRunner.admit; there is always room to spare, nobody else can take it."""
        donor, known = longest_prefix(seq, self._lanes) if self._share else (None, 0)
        length = self._reuse.length(known, len(seq.tokens))
        lane = self._lane_for(donor, known)
        if donor and donor is not lane:
            self._context.restore(lane.index, self._context.save(donor.index))
        self._cut(lane, length)
        lane.owner, lane.kept = seq, []
        self._running[seq] = lane
        return length

    def _lane_for(self, donor: Lane | None, known: int) -> Lane:
        """The donor if it can simply go on, or else what is free or was not used for longest."""
        idle = [lane for lane in self._lanes if not lane.owner]
        if not idle:
            raise NoRoom
        if donor in idle:
            lost = len(donor.kept) - known
            if len(idle) == 1 or lost <= min(LOST_TOKENS, LOST_SHARE * known):
                return donor
        return min((lane for lane in idle if lane is not donor), key=lambda lane: lane.used_at)

    def grow(self, seq: Sequence, n: int) -> bool:
        """As ModelRunner.grow; a sequence may fill its part, which is as long as the context."""
        return True

    def rewind(self, seq: Sequence, length: int) -> None:
        """As ModelRunner.rewind."""
        self._cut(self._running[seq], length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """As ModelRunner.release."""
        lane = self._running.pop(seq)
        lane.kept, lane.owner = lane.tokens if keep and self._share else [], None
        self._cut(lane, len(lane.kept))
        lane.used_at = next(self._clock) if lane.kept else 0
        for other in self._lanes:
            if other is not lane and other.kept and other.kept == lane.kept[: len(other.kept)]:
                # the beginning of this one serves nobody any more
                other.kept, other.used_at = [], 0
                self._cut(other, 0)

    def arrange(self) -> None:
        """Move the running lanes side by side.

        llama.cpp computes consecutive sequence ids together; each gap would make it read the
        weights once more.
        """
        running = list(self._running.values())
        indices = [lane.index for lane in running]
        if max(indices) - min(indices) < len(running):
            return
        by_index = sorted(self._lanes, key=lambda lane: lane.index)
        windows = (by_index[i : i + len(running)] for i in range(len(by_index) - len(running) + 1))
        window = min(windows, key=lambda window: _moved(window, running))
        holes = [lane for lane in window if not lane.owner]
        for lane, hole in zip((lane for lane in running if lane not in window), holes, strict=True):
            self._swap(lane, hole)

    def _swap(self, one: Lane, other: Lane) -> None:
        """Exchange the parts of two lanes."""
        states = [self._context.save(lane.index) if lane.tokens else None for lane in (one, other)]
        one.index, other.index = other.index, one.index
        for lane, state in zip((one, other), states, strict=True):
            if state is None:
                self._context.cut(lane.index, 0)
            else:
                self._context.restore(lane.index, state)

    def _cut(self, lane: Lane, length: int) -> None:
        cut = self._context.cut(lane.index, length)
        assert cut, "a partial cut was asked of a model that cannot rewind"

    def check(self) -> None:
        """As Lanes.check."""
        assert sorted(lane.index for lane in self._lanes) == list(range(len(self._lanes)))
        assert self._running == {lane.owner: lane for lane in self._lanes if lane.owner}
        for lane in self._lanes:
            assert self._context.last_position(lane.index) == len(lane.tokens) - 1


def _moved(window: list[Lane], running: list[Lane]) -> int:
    """Tokens that change places if the running lanes are brought into that window."""
    coming = sum(len(lane.tokens) for lane in running if lane not in window)
    return coming + sum(len(lane.kept) for lane in window if not lane.owner)
