"""One pool of KV cells shared by all sequences; a shared prefix is stored once.

llama.cpp does not report which cells are in use, so they are tracked here with ids and reference
counts: a cell shared by several slots counts once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localgen.backends.engine.background import is_background
from localgen.backends.kv_store.blocks import BLOCK_TOKENS, KVBlock
from localgen.backends.kv_store.prefix_load import PrefixLoad, blocks_after
from localgen.backends.kv_store.store import MIN_PREFIX_TOKENS, FoundBlock, PrefixStore
from localgen.backends.llamacpp.native import LlamaContext
from localgen.backends.llamacpp.slots import CacheSlot, PrefixReusePolicy, longest_prefix
from localgen.backends.runner.interface import NoRoom, PoolUsage
from localgen.backends.runner.sequence import Sequence

# Attention in a step reads every cell in use, including those of other sequences: 3,900 foreign
# cells made a token 8 % slower (measured with 1.2 B parameters on two cores). So the newest
# prefixes stay cached at any length, and older ones only while their total length is small.
MIN_CACHED_PREFIXES = 4
MAX_CACHED_TOKENS = 2048

CellIds = NDArray[np.int32]
_NO_CELLS: CellIds = np.empty(0, np.int32)
# a cached prefix is shortened by at least this much, so that one call makes room for many steps
MIN_TRIM_TOKENS = 64


class SharedSlot(CacheSlot):
    """A slot with the ids of its cells, computed or reserved.

    num_public: leading tokens that may be saved. num_saved: those that need not be saved any more.
    was_reused: most of it was the beginning of another prompt.
    """

    cells: CellIds = _NO_CELLS
    num_public = num_saved = 0
    was_reused = False


class SharedCache:
    """Slots over a unified context, for running sequences and cached prefixes.

    At most max_seqs sequences run and at most max_cached_prefixes are cached.

    store: gets prefixes before they are evicted, and returns them; it needs one more sequence id
    than these. None for no store.
    """

    def __init__(
        self,
        context: LlamaContext,
        *,
        max_seqs: int,
        max_cached_prefixes: int,
        share_prefixes: bool,
        reuse: PrefixReusePolicy,
        store: PrefixStore | None = None,
    ) -> None:
        self._store, self._num_losses = store, 0
        if store is not None:
            store.count_unsaved = self._num_unsaved
            store.on_cleared = self._forget_all
        self._scratch_id = max_seqs + max_cached_prefixes
        self._context = context
        self._share_prefixes = share_prefixes
        self._reuse = reuse
        self._max_cached_prefixes = max_cached_prefixes
        self._free_slots = [
            SharedSlot(index) for index in reversed(range(max_seqs + max_cached_prefixes))
        ]
        self._running: dict[Sequence, SharedSlot] = {}
        self._loads: dict[Sequence, PrefixLoad] = {}
        self._cached_prefixes: list[SharedSlot] = []
        self._refs = np.zeros(context.kv_tokens, np.int32)
        self._free_cells = np.arange(context.kv_tokens, dtype=np.int32)
        self._num_free = context.kv_tokens
        self._clock = itertools.count(1)

    def seq_id_of(self, seq: Sequence) -> int:
        return self._running[seq].seq_id

    def usage(self) -> PoolUsage:
        """See ModelRunner.usage; a cell shared by running and cached sequences counts as used."""
        total, used = (
            len(self._refs),
            self._count_cells(slot.cells for slot in self._running.values()),
        )
        return PoolUsage(used=used, cached=total - self._num_free - used, free=self._num_free)

    def _count_cells(self, parts: Iterable[CellIds]) -> int:
        """Number of distinct cells."""
        held = np.zeros(len(self._refs), np.bool_)
        for cells in parts:
            held[cells] = True
        return int(np.count_nonzero(held))

    # -- allocation and release -------------------------------------------------------------

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return self._longest_prefix(tokens, cache_salt)[1]

    def _longest_prefix(self, tokens: list[int], cache_salt: str) -> tuple[SharedSlot | None, int]:
        candidates = (
            (*self._running.values(), *self._cached_prefixes) if self._share_prefixes else ()
        )
        return longest_prefix(tokens, cache_salt, candidates)

    def admit(self, seq: Sequence, *, spare: int) -> int:
        source, known = self._longest_prefix(seq.reusable_tokens, seq.cache_salt)
        length = self._reuse.reuse_tokens(known, len(seq.tokens))
        if not self._can_reclaim(len(seq.tokens) - length + spare, protect=source, length=length):
            raise NoRoom
        stored = self._stored_after(seq, length)
        if stored:
            length = stored[0].start
        needed = len(seq.tokens) - length
        if not self._can_reclaim(needed + spare, protect=source, length=length):
            raise NoRoom
        # the last block may have tokens beyond the prompt, which take cells while it is restored
        beyond = BLOCK_TOKENS - stored[-1].length if stored else 0
        if not self._can_reclaim(needed + spare + beyond, protect=source, length=length):
            beyond = 0
        is_reuse = source is not None and 2 * known >= len(seq.tokens)
        if source and is_reuse:
            source.was_reused |= 2 * known >= len(source.tokens)
        self._reclaim(needed + spare + beyond, protect=source, length=length)
        slot = self._claim_slot(seq, source if length else None, known, length)
        slot.num_public = min(slot.num_public, length) if slot is source else 0
        slot.num_saved, slot.was_reused = 0, is_reuse
        slot.start(seq)
        self._running[seq] = slot
        self._allocate(slot, needed)
        if self._store is not None and stored:
            put = partial(self._put, slot.seq_id)
            self._loads[seq] = PrefixLoad(self._store, seq.tokens, stored, length, put)
        return length

    def _stored_after(self, seq: Sequence, length: int) -> list[FoundBlock]:
        """Blocks of the store for the prompt's tokens from position `length` on."""
        if self._store is None:
            return []
        return blocks_after(
            self._store,
            seq.reusable_tokens,
            seq.cache_salt,
            length,
            usable=lambda end: self._reuse.reuse_tokens(end, len(seq.tokens)),
            peer=self._store.peer(seq.kv_peer) if seq.save_prefix else None,
        )

    def _put(self, seq_id: int, block: KVBlock, start: int, end: int) -> bool:
        """Append tokens of a block to a sequence; returns False if llama.cpp refuses them."""
        return self._context.restore_range(seq_id, self._scratch_id, start, end, block.state)

    def is_loading(self, seq: Sequence) -> bool:
        return seq in self._loads

    def load_prefix(self, seq: Sequence, until_s: float) -> int:
        load = self._loads[seq]
        load.advance(until_s)
        if load.is_done:
            del self._loads[seq]
        return load.num_loaded

    def _claim_slot(
        self, seq: Sequence, source: SharedSlot | None, prefix_tokens: int, length: int
    ) -> SharedSlot:
        """Take a slot and fill it with the first `length` tokens of the cached sequence, if any.

        prefix_tokens: length of the prompt prefix that `source` holds.
        """
        # a background sequence leaves nothing in its slot when it ends
        is_idle = source and not source.owner and not is_background(seq)
        if source and is_idle and len(source.cached_tokens) <= prefix_tokens:
            self._cached_prefixes.remove(source)  # the prompt contains all of it: continue in place
            self._truncate(source, length)
            return source
        # never empty: fewer than max_seqs run and at most max_cached_prefixes are cached
        slot = self._free_slots.pop()
        if source:
            self._context.copy_prefix(source.seq_id, slot.seq_id, length)
            slot.cells = source.cells[:length].copy()
            self._refs[slot.cells] += 1
        return slot

    def grow(self, seq: Sequence, n: int) -> bool:
        slot = self._running[seq]
        needed = seq.num_computed + n - len(slot.cells)
        if needed <= 0:
            return True
        if not self._reclaim(needed):
            return False
        self._allocate(slot, needed)
        return True

    def rewind(self, seq: Sequence, length: int) -> None:
        self._truncate(self._running[seq], length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        slot = self._running.pop(seq)
        self._loads.pop(seq, None)
        slot.cached_tokens, slot.owner = slot.tokens if keep and self._share_prefixes else [], None
        length = len(slot.cached_tokens)
        slot.num_public = length if seq.save_prefix else min(slot.num_public, length)
        self._truncate(slot, len(slot.cached_tokens))
        if not slot.cached_tokens:
            self._free_slots.append(slot)
            return
        self._evict_prefixes_of(slot)
        slot.last_used = next(self._clock)
        self._cached_prefixes.append(slot)
        if self._store is not None and self._store.is_shared:
            self._save(slot)
        while self._exceeds_cache_limits():
            oldest = _least_recently_used(self._cached_prefixes)
            self._save(oldest)
            self._evict(oldest)

    def save_next_block(self) -> bool:
        if self._store is None or self._store.is_full:
            return False
        if self._num_losses != self._store.num_losses:
            self._num_losses = self._store.num_losses
            for slot in self._cached_prefixes:
                slot.num_saved = 0
        newest_first = sorted(self._cached_prefixes, key=lambda d: d.last_used, reverse=True)
        return any(self._save_block(slot) for slot in newest_first)

    def _forget_all(self) -> None:
        """Save no cached prefix, until a request uses it."""
        for slot in self._cached_prefixes:
            slot.num_public = 0

    def _save_block(self, slot: SharedSlot) -> bool:
        """Save one block of a cached prefix; returns False if the store has all it can get."""
        if self._store is None:
            return False
        if not self._num_left(slot):
            return False
        tokens = slot.cached_tokens[: slot.num_public]
        unsaved = self._store.next_unsaved(tokens, slot.cache_salt, slot.num_saved)
        if unsaved is None:
            slot.num_saved = len(tokens)
            return False
        end = unsaved.start + len(unsaved.tokens)
        copy = partial(self._context.save_range, slot.seq_id, self._scratch_id, unsaved.start, end)
        is_saved = self._store.save(unsaved, copy)
        if is_saved:
            slot.num_saved = end
        elif not self._store.is_full:  # else it is tried again later
            slot.num_saved = len(tokens)
        return is_saved

    def _num_left(self, slot: SharedSlot) -> int:
        """Tokens of a cached prefix that may have to be saved."""
        is_shared = self._store is not None and self._store.is_shared
        is_wanted = slot.was_reused or is_shared or slot.num_public >= MIN_PREFIX_TOKENS
        return max(0, slot.num_public - slot.num_saved) if is_wanted else 0

    def _num_unsaved(self) -> int:
        return sum(self._num_left(slot) for slot in self._cached_prefixes)

    def _save(self, slot: SharedSlot) -> None:
        """Save a cached prefix, in less than a hundredth of the time that computing it took."""
        while self._save_block(slot):
            pass

    def make_contiguous(self) -> None:
        """Do nothing: a unified cache computes any set of sequence ids together."""

    def _exceeds_cache_limits(self) -> bool:
        if len(self._cached_prefixes) > self._max_cached_prefixes:
            return True
        tokens = sum(len(cached.cached_tokens) for cached in self._cached_prefixes)
        return tokens > MAX_CACHED_TOKENS and len(self._cached_prefixes) > MIN_CACHED_PREFIXES

    def _evict_prefixes_of(self, slot: SharedSlot) -> None:
        """Evict cached prefixes that are a prefix of this one: they serve no other prompt."""
        for cached in list(self._cached_prefixes):
            if cached.has_prefix_of(slot):
                slot.num_public = max(slot.num_public, cached.num_public)
                self._evict(cached)

    # -- cached prefixes --------------------------------------------------------------------

    def _trim(self, slot: SharedSlot, length: int) -> None:
        slot.cached_tokens = slot.cached_tokens[:length]
        slot.num_public = min(slot.num_public, length)
        self._truncate(slot, length)

    def _evict(self, slot: SharedSlot) -> None:
        self._cached_prefixes.remove(slot)
        slot.cached_tokens = []
        self._truncate(slot, 0)
        self._free_slots.append(slot)

    def _can_reclaim(
        self, needed: int, *, protect: SharedSlot | None, length: int | None = None
    ) -> bool:
        """Return True if evicting cached prefixes could free `needed` cells. Evicts none.

        length: number of tokens of the protected prefix that must stay; None means all.
        """
        if self._num_free >= needed:
            return True
        held = [slot.cells for slot in self._running.values()]
        if protect:
            held.append(protect.cells[:length])
        return len(self._refs) - self._count_cells(held) >= needed

    def _reclaim(self, needed: int, *, protect: SharedSlot | None = None, length: int = 0) -> bool:
        """Evict or shorten cached prefixes, LRU first. Returns False if too few cells get free.

        length: number of tokens of the protected prefix that must stay.
        """
        while self._num_free < needed:
            evictable = [
                slot
                for slot in self._cached_prefixes
                if slot is not protect or len(slot.cached_tokens) > length
            ]
            if not evictable:
                return False
            cached = _least_recently_used(evictable)
            self._save(cached)
            keep = len(cached.cached_tokens) - max(needed - self._num_free, MIN_TRIM_TOKENS)
            if cached is protect:
                keep = max(keep, length)
            if keep > 0:
                self._trim(cached, keep)
            else:
                self._evict(cached)
        return True

    # -- cells ------------------------------------------------------------------------------

    def _allocate(self, slot: SharedSlot, n: int) -> None:
        assert n <= self._num_free, (n, self._num_free)
        taken = self._free_cells[self._num_free - n : self._num_free].copy()
        self._num_free -= n
        self._refs[taken] = 1
        slot.cells = np.concatenate((slot.cells, taken))

    def _truncate(self, slot: SharedSlot, length: int) -> None:
        """Free the cells beyond `length`, in llama.cpp and here."""
        dropped = slot.cells[length:]
        if not len(dropped):
            return
        cut = self._context.truncate(slot.seq_id, length)
        assert cut, "partial truncation of a model that cannot rewind"
        slot.cells = slot.cells[:length].copy()
        self._refs[dropped] -= 1
        freed = dropped[self._refs[dropped] == 0]
        self._free_cells[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def check(self) -> None:
        refs: NDArray[Any] = np.zeros_like(self._refs)
        for slot in (*self._running.values(), *self._cached_prefixes):
            refs[slot.cells] += 1
            length = len(slot.tokens)
            assert length <= len(slot.cells)
            assert self._context.last_position(slot.seq_id) == length - 1
        assert (refs == self._refs).all()
        if self._store is not None:
            assert self._context.last_position(self._scratch_id) == -1
        assert sorted(self._free_cells[: self._num_free]) == np.flatnonzero(refs == 0).tolist()
        for slot in self._free_slots:
            assert len(slot.cells) == 0
            assert self._context.last_position(slot.seq_id) == -1


def _least_recently_used(slots: Iterable[SharedSlot]) -> SharedSlot:
    return min(slots, key=lambda slot: slot.last_used)
