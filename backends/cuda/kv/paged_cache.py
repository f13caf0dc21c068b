"""Page tables of the sequences: the KV cache methods of ModelRunner."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, PagePool, pages_for
from localgen.backends.cuda.kv.radix_tree import RadixTree
from localgen.backends.runner.interface import NoRoom, PoolUsage
from localgen.backends.runner.sequence import Sequence


class PagedCache:
    """Page tables of running sequences, and a tree of cached prefixes.

    Pages are allocated on demand, so at most PAGE_TOKENS - 1 tokens per sequence are unused. admit,
    grow, rewind, release and usage implement those of ModelRunner.

    prefix_cache: keep and share prefixes.
    """

    def __init__(self, num_pages: int, *, prefix_cache: bool) -> None:
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(self._pool)
        self._prefix_cache = prefix_cache
        self._page_tables: dict[Sequence, array[int]] = {}
        self._num_published: dict[Sequence, int] = {}  # leading pages in the prefix tree
        self._pending_copies: dict[int, int] = {}  # target -> source

    def page_table(self, seq: Sequence) -> NDArray[np.int32]:
        """The pages of a running sequence, in order, int32 [pages]."""
        return np.array(self._page_tables[seq], np.int32)

    def copy_pending(self, copy: Callable[[list[tuple[int, int]]], object]) -> None:
        """Call `copy` with the pages to copy before the next step; if it raises, they stay pending.

        They are (source, target) with distinct targets. The copies are simultaneous: all sources
        must be read before any target is written.
        """
        copy([(source, target) for target, source in self._pending_copies.items()])
        self._pending_copies.clear()

    def usage(self) -> PoolUsage:
        """Pages that are both in use and cached count as used."""
        free, idle = self._pool.num_free, self._pool.num_idle
        used = self._pool.num_pages - free - idle
        return PoolUsage(used * PAGE_TOKENS, idle * PAGE_TOKENS, free * PAGE_TOKENS)

    def admit(self, seq: Sequence, *, spare: int) -> int:
        for other in self._page_tables:
            self._publish(other)
        known = self._tree.match(seq.tokens[:-1], seq.cache_salt) if self._prefix_cache else []
        needed = pages_for(len(seq.tokens)) - len(known)
        self._pool.acquire(known)  # before eviction, which could free them
        if not self._has_free_pages(needed + pages_for(spare)):
            self._pool.release(known)
            raise NoRoom
        self._page_tables[seq] = array("i", known + self._allocate(needed))
        self._num_published[seq] = len(known)
        return len(known) * PAGE_TOKENS

    def admit_uncached(self, seq: Sequence) -> None:
        """Allocate pages for all tokens of `seq`, without sharing or caching. Raises NoRoom."""
        needed = pages_for(len(seq.tokens))
        if not self._has_free_pages(needed):
            raise NoRoom
        self._page_tables[seq] = array("i", self._allocate(needed))
        self._num_published[seq] = 0

    def grow(self, seq: Sequence, n: int) -> bool:
        """Provide pages for n more tokens; False if too few are free.

        Shared pages are copied before they are written.
        """
        table, done = self._page_tables[seq], seq.num_computed
        first, end = done // PAGE_TOKENS, pages_for(done + n)
        if end == first + 1 <= len(table) and self._pool.can_write(table[first]):
            return True  # the common case during decode
        last = first  # shared pages precede writable ones in a table
        while last < min(end, len(table)) and not self._pool.can_write(table[last]):
            last += 1
        shared, missing = table[first:last], max(0, end - len(table))
        if not self._has_free_pages(len(shared) + missing):
            return False
        table += array("i", self._allocate(missing))
        if shared:
            self._copy_on_write(seq, first, shared)
        return True

    def _copy_on_write(self, seq: Sequence, first: int, shared: array[int]) -> None:
        """Replace the shared pages from index `first` by new ones.

        Only the first of them can hold computed tokens that need to be copied.
        """
        fresh = self._allocate(len(shared))
        if seq.num_computed % PAGE_TOKENS:
            self._schedule_copy(shared[0], fresh[0])
        self._page_tables[seq][first : first + len(shared)] = array("i", fresh)
        assert self._num_published[seq] <= first, (self._num_published[seq], first)
        self._pool.release(shared)

    def _schedule_copy(self, source: int, target: int) -> None:
        # the source may itself be the target of a pending copy; an older copy to `target` is void
        self._pending_copies[target] = self._pending_copies.get(source, source)

    def rewind(self, seq: Sequence, length: int) -> None:
        table, kept = self._page_tables[seq], pages_for(length)
        self._num_published[seq] = min(self._num_published[seq], length // PAGE_TOKENS)
        self._pool.release(table[kept:])
        del table[kept:]

    def release(self, seq: Sequence, *, keep: bool) -> None:
        if keep:
            self._publish(seq)
        del self._num_published[seq]
        self._pool.release(self._page_tables.pop(seq))

    def _publish(self, seq: Sequence) -> None:
        """Insert the computed full pages into the prefix tree.

        If the tree already has a page with the same prefix, it replaces the sequence's own page.
        """
        start, full = self._num_published[seq], seq.num_computed // PAGE_TOKENS
        if not self._prefix_cache or full <= start:
            return
        table = self._page_tables[seq]
        own = table[start:full]
        known = self._tree.insert(seq.tokens, table[:full], start, seq.cache_salt)
        self._pool.acquire(known)
        self._pool.release(own)
        table[start:full] = array("i", known)
        self._num_published[seq] = full

    def _has_free_pages(self, count: int) -> bool:
        return self._pool.num_free + self._pool.num_idle >= count

    def _allocate(self, count: int) -> list[int]:
        self._tree.evict(count - self._pool.num_free)
        return self._pool.allocate(count)

    def check(self) -> None:
        """Assert that all data structures are consistent. For tests."""
        users = Counter(page for table in self._page_tables.values() for page in table)
        self._pool.check(users, self._tree.pages)
        self._tree.check()
        for seq, table in self._page_tables.items():
            assert len(set(table)) == len(table)
            assert len(table) >= pages_for(seq.num_computed)
            known = self._num_published[seq]
            published = seq.tokens[: known * PAGE_TOKENS]
            assert self._tree.match(published, seq.cache_salt) == table[:known].tolist()
