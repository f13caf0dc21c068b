"""A KV cache split into one part per sequence: a step reads only the tokens of its sequences.

A cached prefix does not slow down other sequences, and a shared one is copied, in about a
thousandth of the time it takes to compute. A sequence's unused cells are not available to others.
"""

from __future__ import annotations

import itertools

from localgen.backends.llamacpp.native import LlamaContext
from localgen.backends.llamacpp.slots import CacheSlot, PrefixReusePolicy, longest_prefix
from localgen.backends.runner.interface import NoRoom, PoolUsage
from localgen.backends.runner.sequence import Sequence

# A cached prefix is continued in place if at most this many tokens, and at most this fraction of
# the shared part, are lost. The end of an answer often comes back tokenized differently than it was
# sampled, and then is not reused.
MAX_LOST_TOKENS, MAX_LOST_FRACTION = 32, 1 / 8


class SplitCache:
    """Slots over a non-unified context; each slot has room for the full context length."""

    def __init__(
        self, context: LlamaContext, *, share_prefixes: bool, reuse: PrefixReusePolicy
    ) -> None:
        self._context = context
        self._share_prefixes = share_prefixes
        self._reuse = reuse
        self._slots = [CacheSlot(index) for index in range(context.n_seq_max)]
        self._running: dict[Sequence, CacheSlot] = {}
        self._taken_over: dict[Sequence, int] = {}  # leading tokens that its slot had cached
        self._clock = itertools.count(1)

    def seq_id_of(self, seq: Sequence) -> int:
        return self._running[seq].seq_id

    def usage(self) -> PoolUsage:
        used = sum(seq.num_computed for seq in self._running)
        cached = sum(len(slot.cached_tokens) for slot in self._slots)
        return PoolUsage(used, cached, self._context.kv_tokens - used - cached)

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return self._longest_prefix(tokens, cache_salt)[1]

    def _longest_prefix(self, tokens: list[int], cache_salt: str) -> tuple[CacheSlot | None, int]:
        return longest_prefix(tokens, cache_salt, self._slots if self._share_prefixes else ())

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """See ModelRunner.admit. `spare` is ignored: slots do not share room."""
        source, known = self._longest_prefix(seq.reusable_tokens, seq.cache_salt)
        length = self._reuse.reuse_tokens(known, len(seq.tokens))
        slot = self._choose_slot(source, known)
        if source and source is not slot:
            self._context.restore(slot.seq_id, self._context.save(source.seq_id))
        self._truncate(slot, length)
        slot.start(seq)
        self._running[seq], self._taken_over[seq] = slot, known if slot is source else 0
        return length

    def _choose_slot(self, source: CacheSlot | None, prefix_tokens: int) -> CacheSlot:
        """Return the source slot if it can be continued in place, else a free or the LRU slot."""
        idle = [slot for slot in self._slots if not slot.owner]
        if not idle:
            raise NoRoom
        if source in idle:
            lost = len(source.cached_tokens) - prefix_tokens
            if len(idle) == 1 or lost <= min(MAX_LOST_TOKENS, MAX_LOST_FRACTION * prefix_tokens):
                return source
        return min((slot for slot in idle if slot is not source), key=lambda slot: slot.last_used)

    def grow(self, seq: Sequence, n: int) -> bool:
        """Return True: the slot of a sequence has room for the full context length."""
        return True

    def rewind(self, seq: Sequence, length: int) -> None:
        self._truncate(self._running[seq], length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        slot, taken_over = self._running.pop(seq), self._taken_over.pop(seq)
        kept = slot.tokens if keep and self._share_prefixes else slot.tokens[:taken_over]
        slot.cached_tokens, slot.owner = kept, None
        if not keep and any(map(slot.has_prefix_of, self._slots)):
            slot.cached_tokens = []
        self._truncate(slot, len(slot.cached_tokens))
        slot.last_used = next(self._clock) if slot.cached_tokens else 0
        for other in self._slots:
            if other.has_prefix_of(slot):
                other.cached_tokens, other.last_used = [], 0
                self._truncate(other, 0)

    # llama.cpp can neither save nor append a part of a sequence here

    def is_loading(self, seq: Sequence) -> bool:
        return False

    def load_prefix(self, seq: Sequence, until_s: float) -> int:
        return seq.num_computed

    def save_next_block(self) -> bool:
        return False

    def make_contiguous(self) -> None:
        """Move the running slots to consecutive sequence ids.

        llama.cpp computes consecutive ids together; each gap would make it read the weights once
        more.
        """
        running = list(self._running.values())
        indices = [slot.seq_id for slot in running]
        if max(indices) - min(indices) < len(running):
            return
        by_index = sorted(self._slots, key=lambda slot: slot.seq_id)
        windows = (by_index[i : i + len(running)] for i in range(len(by_index) - len(running) + 1))
        window = min(windows, key=lambda window: _num_moved_tokens(window, running))
        holes = [slot for slot in window if not slot.owner]
        for slot, hole in zip((slot for slot in running if slot not in window), holes, strict=True):
            self._swap(slot, hole)

    def _swap(self, one: CacheSlot, other: CacheSlot) -> None:
        """Exchange the cached state of two slots."""
        states = [self._context.save(slot.seq_id) if slot.tokens else None for slot in (one, other)]
        one.seq_id, other.seq_id = other.seq_id, one.seq_id
        for slot, state in zip((one, other), states, strict=True):
            if state is None:
                self._context.truncate(slot.seq_id, 0)
            else:
                self._context.restore(slot.seq_id, state)

    def _truncate(self, slot: CacheSlot, length: int) -> None:
        cut = self._context.truncate(slot.seq_id, length)
        assert cut, "partial truncation of a model that cannot rewind"

    def check(self) -> None:
        assert sorted(slot.seq_id for slot in self._slots) == list(range(len(self._slots)))
        assert self._running == {slot.owner: slot for slot in self._slots if slot.owner}
        for slot in self._slots:
            assert self._context.last_position(slot.seq_id) == len(slot.tokens) - 1


def _num_moved_tokens(window: list[CacheSlot], running: list[CacheSlot]) -> int:
    """Number of tokens to move if the running slots are placed in that window."""
    coming = sum(len(slot.tokens) for slot in running if slot not in window)
    return coming + sum(len(slot.cached_tokens) for slot in window if not slot.owner)
