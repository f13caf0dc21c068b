"""Page tables of the sequences: the KV cache methods of ModelRunner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, PagePool, pages_for
from localgen.backends.cuda.kv.page_tables import PageTables
from localgen.backends.cuda.kv.radix_tree import RadixTree
from localgen.backends.cuda.kv.stored_pages import PageMemory, StoredPages
from localgen.backends.kv_store.prefix_load import PrefixLoad
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.interface import NoRoom, PoolUsage
from localgen.backends.runner.sequence import Sequence


@dataclass(slots=True)
class _SequencePages:
    """The pages of a running sequence.

    slot: of its page table. num_published: leading pages in the prefix tree. writable_tokens: its
    pages can be written from the computed tokens up to this length.
    """

    slot: int
    num_published: int = 0
    writable_tokens: int = 0


class PagedCache:
    """Page tables of running sequences, and a tree of cached prefixes.

    Pages are allocated on demand, so at most PAGE_TOKENS - 1 tokens per sequence are unused. admit,
    num_cached, grow, rewind, release and usage implement those of ModelRunner.

    prefix_cache: keep and share prefixes. store: gets prefixes before they are evicted, and returns
    them. memory: the keys and values of the pages, for the store.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        prefix_cache: bool,
        store: PrefixStore | None = None,
        memory: PageMemory | None = None,
    ) -> None:
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(self._pool)
        self._stored = StoredPages(store, self._tree, memory) if store and memory else None
        self._prefix_cache = prefix_cache
        self._tables = PageTables()
        self._sequences: dict[Sequence, _SequencePages] = {}
        self._loads: dict[Sequence, PrefixLoad] = {}
        self._pending_copies: dict[int, int] = {}  # target -> source

    def slot(self, seq: Sequence) -> int:
        """The slot of a running sequence: a small number that no other one has meanwhile."""
        return self._sequences[seq].slot

    def slots(self, seqs: Seq[Sequence]) -> NDArray[np.int64]:
        """The slots of running sequences, int64 [seqs]."""
        running = self._sequences
        return np.array([running[seq].slot for seq in seqs], np.int64)

    def page_table(self, seq: Sequence) -> NDArray[np.int32]:
        """The pages of a running sequence, in order, int32 [pages], valid until they change."""
        return self._tables.row(self.slot(seq))

    def page_tables(self, slots: NDArray[np.int64], num_pages: int) -> NDArray[np.int32]:
        """The first pages of running sequences, int32 [slots, num_pages]; 0 after the last."""
        return self._tables.rows(slots, num_pages)

    @property
    def tables_version(self) -> int:
        """Changes whenever a page in the table of a running sequence is replaced or removed."""
        return self._tables.version

    def pages_at(self, slots: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """The pages of one position of each sequence, int32 [slots]."""
        return self._tables.pages_at(slots, positions // PAGE_TOKENS)

    def writable_tokens(self, seq: Sequence) -> int:
        """Length up to which `grow` has provided pages that can be written, or 0 if not known."""
        return self._sequences[seq].writable_tokens

    def copy_pending(self, copy: Callable[[list[tuple[int, int]]], object]) -> None:
        """Call `copy` with the pages to copy before the next step; if it raises, they stay pending.

        They are (source, target) with distinct targets. The copies are simultaneous: all sources
        must be read before any target is written.
        """
        if not self._pending_copies:
            return
        copy([(source, target) for target, source in self._pending_copies.items()])
        self._pending_copies.clear()

    def usage(self) -> PoolUsage:
        """Pages that are both in use and cached count as used."""
        free, idle = self._pool.num_free, self._pool.num_idle
        used = self._pool.num_pages - free - idle
        return PoolUsage(used * PAGE_TOKENS, idle * PAGE_TOKENS, free * PAGE_TOKENS)

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return len(self._cached_pages(tokens, cache_salt)) * PAGE_TOKENS

    def _cached_pages(self, tokens: list[int], cache_salt: str) -> list[int]:
        """The pages of the longest cached prefix, those of running sequences included."""
        for other in self._sequences:
            self._publish(other)
        return self._tree.match(tokens, cache_salt) if self._prefix_cache else []

    def admit(self, seq: Sequence, *, spare: int) -> int:
        known = self._cached_pages(seq.reusable_tokens, seq.cache_salt)
        needed = pages_for(len(seq.tokens)) - len(known)
        self._pool.acquire(known)  # before eviction, which could free them
        if not self._has_free_pages(needed + pages_for(spare)):
            self._pool.release(known)
            raise NoRoom
        is_most = 2 * len(known) * PAGE_TOKENS >= len(seq.tokens)
        if known and is_most and self._stored is not None and seq.save_prefix:
            self._stored.mark_reused(known[-1])
        self._add(seq, known, self._allocate(needed))
        cached = len(known) * PAGE_TOKENS
        if self._stored is not None:
            load = self._stored.load(
                seq.reusable_tokens,
                seq.cache_salt,
                self.page_table(seq).tolist(),
                cached,
                peer=seq.kv_peer if seq.save_prefix else None,
            )
            if load is not None:
                self._loads[seq] = load
        return cached

    def is_loading(self, seq: Sequence) -> bool:
        """See TieredRunner."""
        return seq in self._loads

    def load_prefix(self, seq: Sequence, until_s: float) -> int:
        """See TieredRunner."""
        assert self._stored is not None
        # pages are written at once: those that others wait to copy must be copied before
        self.copy_pending(self._stored.memory.copy_pages)
        load = self._loads[seq]
        load.advance(until_s)
        if load.is_done:
            del self._loads[seq]
        return load.num_loaded

    def save_next_block(self) -> bool:
        """See TieredRunner."""
        is_idle = not self._sequences
        return self._stored is not None and self._stored.save_next_block(may_wait=is_idle)

    def admit_uncached(self, seq: Sequence) -> None:
        """Allocate pages for all tokens of `seq`, without sharing or caching. Raises NoRoom."""
        needed = pages_for(len(seq.tokens))
        if not self._has_free_pages(needed):
            raise NoRoom
        self._add(seq, [], self._allocate(needed))

    def _add(self, seq: Sequence, known: list[int], fresh: list[int]) -> None:
        """Start the page table of `seq`. known: pages of the prefix tree."""
        pages = _SequencePages(self._tables.add(), num_published=len(known))
        self._tables.extend(pages.slot, known + fresh)
        self._sequences[seq] = pages

    def grow(self, seq: Sequence, n: int) -> bool:
        """Provide pages for n more tokens; False if too few are free.

        Shared pages are copied before they are written.
        """
        pages, length = self._sequences[seq], seq.num_computed + n
        return length <= pages.writable_tokens or self._make_writable(seq, pages, length)

    def _make_writable(self, seq: Sequence, pages: _SequencePages, length: int) -> bool:
        first, end = seq.num_computed // PAGE_TOKENS, pages_for(length)
        table = self.page_table(seq)
        last = first  # shared pages precede writable ones in a table
        while last < min(end, len(table)) and not self._pool.can_write(int(table[last])):
            last += 1
        shared, missing = table[first:last].tolist(), max(0, end - len(table))
        if not self._has_free_pages(len(shared) + missing):
            return False
        self._tables.extend(pages.slot, self._allocate(missing))
        if shared:
            self._copy_on_write(seq, first, shared)
        pages.writable_tokens = end * PAGE_TOKENS
        return True

    def _copy_on_write(self, seq: Sequence, first: int, shared: list[int]) -> None:
        """Replace the shared pages from index `first` by new ones.

        Only the first of them can hold computed tokens that need to be copied.
        """
        fresh, pages = self._allocate(len(shared)), self._sequences[seq]
        if seq.num_computed % PAGE_TOKENS:
            self._schedule_copy(shared[0], fresh[0])
        self._tables.replace(pages.slot, first, fresh)
        assert pages.num_published <= first, (pages.num_published, first)
        self._pool.release(shared)

    def _schedule_copy(self, source: int, target: int) -> None:
        # the source may itself be the target of a pending copy; an older copy to `target` is void
        self._pending_copies[target] = self._pending_copies.get(source, source)

    def rewind(self, seq: Sequence, length: int) -> None:
        pages = self._sequences[seq]
        pages.num_published = min(pages.num_published, length // PAGE_TOKENS)
        pages.writable_tokens = 0  # the last page may be shared
        self._pool.release(self._tables.truncate(pages.slot, pages_for(length)))

    def release(self, seq: Sequence, *, keep: bool) -> None:
        if keep:
            self._publish(seq)
            if self._stored is not None:
                self._stored.save_at_release()
        self._loads.pop(seq, None)
        self._pool.release(self._tables.remove(self._sequences.pop(seq).slot))

    def _publish(self, seq: Sequence) -> None:
        """Insert the computed full pages into the prefix tree.

        If the tree already has a page with the same prefix, it replaces the sequence's own page.
        """
        pages, full = self._sequences[seq], seq.num_computed // PAGE_TOKENS
        start = pages.num_published
        if not self._prefix_cache or full <= start:
            return
        own = self.page_table(seq)[:full].tolist()
        known = self._tree.insert(seq.tokens, own, start, seq.cache_salt)
        if self._stored is not None and seq.save_prefix:
            self._stored.add([page for page in own[start:] if page in known])
        self._pool.acquire(known)
        self._pool.release(own[start:])
        self._tables.replace(pages.slot, start, known)
        pages.num_published = full

    def _has_free_pages(self, count: int) -> bool:
        return self._pool.num_free + self._pool.num_idle >= count

    def _allocate(self, count: int) -> list[int]:
        missing = count - self._pool.num_free
        if self._stored is not None:
            idle = self._pool.least_recent_idle(missing)
            self._stored.evict(idle, save=not self._sequences)  # running ones would wait
        self._tree.evict(missing)
        return self._pool.allocate(count)

    def check(self) -> None:
        """Assert that all data structures are consistent. For tests."""
        tables = {seq: self.page_table(seq).tolist() for seq in self._sequences}
        users = Counter(page for table in tables.values() for page in table)
        self._pool.check(users, self._tree.pages)
        self._tree.check()
        assert len({pages.slot for pages in self._sequences.values()}) == len(tables)
        for seq, table in tables.items():
            assert len(set(table)) == len(table)
            assert len(table) >= pages_for(seq.num_computed)
            pages = self._sequences[seq]
            published = seq.tokens[: pages.num_published * PAGE_TOKENS]
            assert self._tree.match(published, seq.cache_salt) == table[: pages.num_published]
            first, end = seq.num_computed // PAGE_TOKENS, pages_for(pages.writable_tokens)
            assert end <= len(table)
            assert all(self._pool.can_write(page) for page in table[first:end])
