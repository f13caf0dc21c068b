"""Reference-counted pages of the KV cache.

A page is free, in use, or idle (cached as a prefix, but not used by any sequence).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from localgen.backends.runner.interface import NoRoom

PAGE_TOKENS = 16


def pages_for(tokens: int) -> int:
    """Number of pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Pages 0 to num_pages - 1 with reference counts; every call takes constant time per page.

    A page with reference count 0 is free, or idle if the prefix tree keeps it.
    """

    def __init__(self, num_pages: int) -> None:
        self._ref_counts = [0] * num_pages
        self._free = list(reversed(range(num_pages)))
        self._cached: set[int] = set()
        self._idle: dict[int, None] = {}  # in order of last use

    @property
    def num_pages(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of pages that only the prefix tree keeps."""
        return len(self._idle)

    def can_write(self, page: int) -> bool:
        """True if a page has exactly one user and is not in the prefix tree."""
        return self._ref_counts[page] == 1 and page not in self._cached

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, with reference count 1. Raises NoRoom if there are fewer."""
        if count > len(self._free):
            raise NoRoom
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._ref_counts[page] = 1
        return taken

    def acquire(self, pages: Sequence[int]) -> None:
        """Increment the reference count of each page; none of them may be free."""
        for page in pages:
            if self._ref_counts[page] == 0:
                del self._idle[page]
            self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Decrement the reference count of each page of one sequence, in the sequence's order.

        The last page becomes idle first, because a prefix is still useful without its end.
        """
        for page in reversed(pages):
            assert self._ref_counts[page] > 0, page
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if page in self._cached:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def mark_cached(self, page: int) -> None:
        """Mark a page in use as kept by the prefix tree."""
        assert self._ref_counts[page] > 0, page
        assert page not in self._cached, page
        self._cached.add(page)

    def least_recent_idle(self, count: int) -> list[int]:
        """The `count` least recently used idle pages, or all if there are fewer."""
        return list(islice(self._idle, max(0, count)))

    def evict(self, page: int) -> None:
        """Free an idle page."""
        del self._idle[page]
        self._cached.remove(page)
        self._free.append(page)

    def check(self, ref_counts: Mapping[int, int], cached: set[int]) -> None:
        """Assert that every page is free, idle or in use, given the expected state. For tests.

        ref_counts: expected reference counts. cached: pages of the prefix tree.
        """
        assert self._ref_counts == [ref_counts.get(page, 0) for page in range(self.num_pages)]
        assert self._cached == cached
        unused = {page for page, count in enumerate(self._ref_counts) if count == 0}
        assert set(self._idle) == unused & cached
        assert sorted(self._free) == sorted(unused - cached)
