"""Which pages belong to which sequence: the room half of ModelRunner."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, PagePool, pages_for
from localgen.backends.cuda.kv.radix_tree import RadixTree
from localgen.backends.runner.interface import NoRoom, PoolUsage
from localgen.backends.runner.sequence import Sequence


class PagedCache:
    """Tables of pages for running sequences, and a tree of prefixes. No page is taken ahead of
    need, so that at most PAGE_TOKENS - 1 tokens of room a sequence are unused.

    share: whether prefixes are kept and shared.
    """

    def __init__(self, num_pages: int, *, share: bool) -> None:
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(self._pool)
        self._share = share
        self._tables: dict[Sequence, array[int]] = {}
        self._published: dict[Sequence, int] = {}  # pages of each that are in the tree
        self._copies: dict[int, int] = {}  # sources by target

    def table(self, seq: Sequence) -> NDArray[np.int32]:
        """The pages of a running sequence, in order."""
        return np.array(self._tables[seq], np.int32)

    def take_copies(self) -> list[tuple[int, int]]:
        """Pages to copy before the next step, (source, target); no target twice.

        All of them at once: every source is read before any target is written.
        """
        copies, self._copies = self._copies, {}
        return [(source, target) for target, source in copies.items()]

    def usage(self) -> PoolUsage:
        """As ModelRunner.usage; a page of a running sequence and the tree counts as used."""
        free, idle = self._pool.num_free, self._pool.num_idle
        used = self._pool.num_pages - free - idle
        return PoolUsage(used * PAGE_TOKENS, idle * PAGE_TOKENS, free * PAGE_TOKENS)

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """As ModelRunner.admit."""
        for other in self._tables:
            self._publish(other)
        known = self._tree.match(seq.tokens[:-1]) if self._share else []
        needed = pages_for(len(seq.tokens)) - len(known)
        self._pool.hold(known)  # or making room could take them
        if not self._has_room(needed + pages_for(spare)):
            self._pool.drop(known)
            raise NoRoom
        self._tables[seq] = array("i", known + self._take(needed))
        self._published[seq] = len(known)
        return len(known) * PAGE_TOKENS

    def lend(self, seq: Sequence) -> None:
        """Room for all tokens of `seq`, which shares nothing and of which nothing is kept, until
        it is released. NoRoom."""
        needed = pages_for(len(seq.tokens))
        if not self._has_room(needed):
            raise NoRoom
        self._tables[seq] = array("i", self._take(needed))
        self._published[seq] = 0

    def grow(self, seq: Sequence, n: int) -> bool:
        """As ModelRunner.grow; pages that others have too are replaced before they are written."""
        table, done = self._tables[seq], seq.num_computed
        first, end = done // PAGE_TOKENS, pages_for(done + n)
        if end == first + 1 <= len(table) and self._pool.can_write(table[first]):
            return True  # as nearly always while decoding
        last = first  # shared pages come first in a table
        while last < min(end, len(table)) and not self._pool.can_write(table[last]):
            last += 1
        shared, missing = table[first:last], max(0, end - len(table))
        if not self._has_room(len(shared) + missing):
            return False
        table += array("i", self._take(missing))
        if shared:
            self._replace(seq, first, shared)
        return True

    def _replace(self, seq: Sequence, first: int, shared: array[int]) -> None:
        """Copy on write: pages of its own from `first` on; only that one holds anything yet."""
        fresh = self._take(len(shared))
        if seq.num_computed % PAGE_TOKENS:
            self._copy(shared[0], fresh[0])
        self._tables[seq][first : first + len(shared)] = array("i", fresh)
        assert self._published[seq] <= first, (self._published[seq], first)
        self._pool.drop(shared)

    def _copy(self, source: int, target: int) -> None:
        # the source may wait for a copy itself; and what its target was to get before is void
        self._copies[target] = self._copies.get(source, source)

    def fork(self, seq: Sequence, new: Sequence) -> int:
        """`new` begins with all that is computed of `seq`; how many tokens that is.

        Neither may be computed any further before grow was called for it.
        """
        done = seq.num_computed
        assert new.tokens[:done] == seq.tokens[:done]
        self._publish(seq)  # or one of them could later swap its first pages without the other
        self._tables[new] = self._tables[seq][: pages_for(done)]
        self._pool.hold(self._tables[new])
        self._published[new] = self._published[seq]
        return done

    def rewind(self, seq: Sequence, length: int) -> None:
        """As ModelRunner.rewind."""
        table, kept = self._tables[seq], pages_for(length)
        self._published[seq] = min(self._published[seq], length // PAGE_TOKENS)
        self._pool.drop(table[kept:])
        del table[kept:]

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """As ModelRunner.release."""
        if keep:
            self._publish(seq)
        del self._published[seq]
        self._pool.drop(self._tables.pop(seq))

    def _publish(self, seq: Sequence) -> None:
        """Let others find the full pages that are computed.

        A page that is known already takes the place of the sequence's own.
        """
        start, full = self._published[seq], seq.num_computed // PAGE_TOKENS
        if not self._share or full <= start:
            return
        table = self._tables[seq]
        own = table[start:full]
        known = self._tree.insert(seq.tokens, table[:full], start)
        self._pool.hold(known)
        self._pool.drop(own)
        table[start:full] = array("i", known)
        self._published[seq] = full

    def _has_room(self, count: int) -> bool:
        return self._pool.num_free + self._pool.num_idle >= count

    def _take(self, count: int) -> list[int]:
        self._tree.evict(count - self._pool.num_free)
        return self._pool.take(count)

    def check(self) -> None:
        """Assert that the books are whole. For tests."""
        users = Counter(page for table in self._tables.values() for page in table)
        self._pool.check(users, self._tree.pages)
        self._tree.check()
        for seq, table in self._tables.items():
            assert len(set(table)) == len(table)
            assert len(table) >= pages_for(seq.num_computed)
            known = self._published[seq]
            assert self._tree.match(seq.tokens[: known * PAGE_TOKENS]) == table[:known].tolist()
