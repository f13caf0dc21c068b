"""A part of the cache for each sequence: a step reads only what its own sequences have written.

A kept prefix costs others nothing here, and a shared one is copied, at about a thousandth of
the time that computing it takes. What a sequence does not use of its part nobody else can.
"""

from __future__ import annotations

import itertools

from localgen.backends.llamacpp.native import LlamaContext
from localgen.backends.llamacpp.slots import CacheSlot, PrefixReusePolicy, longest_prefix
from localgen.backends.runner.interface import NoRoom, PoolUsage
from localgen.backends.runner.sequence import Sequence

# A donor goes on itself if no more than this, and no more than this share of what is wanted, is
# lost of it. The end of an answer often comes back as other tokens than were sampled, and nobody
# asks for those again.
MAX_LOST_TOKENS, MAX_LOST_FRACTION = 32, 1 / 8


class SplitCache:
    """Lanes over a context that is not unified; every lane has room for a whole context."""

    def __init__(
        self, context: LlamaContext, *, share_prefixes: bool, reuse: PrefixReusePolicy
    ) -> None:
        self._context = context
        self._share_prefixes = share_prefixes
        self._reuse = reuse
        self._slots = [CacheSlot(index) for index in range(context.n_seq_max)]
        self._running: dict[Sequence, CacheSlot] = {}
        self._clock = itertools.count(1)

    def seq_id_of(self, seq: Sequence) -> int:
        """As SlotCache.seq_id_of."""
        return self._running[seq].seq_id

    def usage(self) -> PoolUsage:
        """As ModelRunner.usage."""
        used = sum(seq.num_computed for seq in self._running)
        cached = sum(len(lane.cached_tokens) for lane in self._slots)
        return PoolUsage(used, cached, self._context.kv_tokens - used - cached)

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """As ModelRunner.admit; there is always room to spare, nobody else can take it."""
        donor, known = longest_prefix(seq, self._slots) if self._share_prefixes else (None, 0)
        length = self._reuse.reuse_tokens(known, len(seq.tokens))
        lane = self._choose_slot(donor, known)
        if donor and donor is not lane:
            self._context.restore(lane.seq_id, self._context.save(donor.seq_id))
        self._truncate(lane, length)
        lane.owner, lane.cached_tokens = seq, []
        self._running[seq] = lane
        return length

    def _choose_slot(self, source: CacheSlot | None, prefix_tokens: int) -> CacheSlot:
        """The donor if it can simply go on, or else what is free or was not used for longest."""
        idle = [lane for lane in self._slots if not lane.owner]
        if not idle:
            raise NoRoom
        if source in idle:
            lost = len(source.cached_tokens) - prefix_tokens
            if len(idle) == 1 or lost <= min(MAX_LOST_TOKENS, MAX_LOST_FRACTION * prefix_tokens):
                return source
        return min((lane for lane in idle if lane is not source), key=lambda lane: lane.last_used)

    def grow(self, seq: Sequence, n: int) -> bool:
        """As ModelRunner.grow; a sequence may fill its part, which is as long as the context."""
        return True

    def rewind(self, seq: Sequence, length: int) -> None:
        """As ModelRunner.rewind."""
        self._truncate(self._running[seq], length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """As ModelRunner.release."""
        lane = self._running.pop(seq)
        lane.cached_tokens, lane.owner = lane.tokens if keep and self._share_prefixes else [], None
        self._truncate(lane, len(lane.cached_tokens))
        lane.last_used = next(self._clock) if lane.cached_tokens else 0
        for other in self._slots:
            if (
                other is not lane
                and other.cached_tokens
                and other.cached_tokens == lane.cached_tokens[: len(other.cached_tokens)]
            ):
                # the beginning of this one serves nobody any more
                other.cached_tokens, other.last_used = [], 0
                self._truncate(other, 0)

    def make_contiguous(self) -> None:
        """Move the running lanes side by side.

        llama.cpp computes consecutive sequence ids together; each gap would make it read the
        weights once more.
        """
        running = list(self._running.values())
        indices = [lane.seq_id for lane in running]
        if max(indices) - min(indices) < len(running):
            return
        by_index = sorted(self._slots, key=lambda lane: lane.seq_id)
        windows = (by_index[i : i + len(running)] for i in range(len(by_index) - len(running) + 1))
        window = min(windows, key=lambda window: _num_moved_tokens(window, running))
        holes = [lane for lane in window if not lane.owner]
        for lane, hole in zip((lane for lane in running if lane not in window), holes, strict=True):
            self._swap(lane, hole)

    def _swap(self, one: CacheSlot, other: CacheSlot) -> None:
        """Exchange the parts of two lanes."""
        states = [self._context.save(lane.seq_id) if lane.tokens else None for lane in (one, other)]
        one.seq_id, other.seq_id = other.seq_id, one.seq_id
        for lane, state in zip((one, other), states, strict=True):
            if state is None:
                self._context.truncate(lane.seq_id, 0)
            else:
                self._context.restore(lane.seq_id, state)

    def _truncate(self, slot: CacheSlot, length: int) -> None:
        cut = self._context.truncate(slot.seq_id, length)
        assert cut, "a partial cut was asked of a model that cannot rewind"

    def check(self) -> None:
        """As SlotCache.check."""
        assert sorted(lane.seq_id for lane in self._slots) == list(range(len(self._slots)))
        assert self._running == {lane.owner: lane for lane in self._slots if lane.owner}
        for lane in self._slots:
            assert self._context.last_position(lane.seq_id) == len(lane.tokens) - 1


def _num_moved_tokens(window: list[CacheSlot], running: list[CacheSlot]) -> int:
    """Tokens that change places if the running lanes are brought into that window."""
    coming = sum(len(lane.tokens) for lane in running if lane not in window)
    return coming + sum(len(lane.cached_tokens) for lane in window if not lane.owner)
