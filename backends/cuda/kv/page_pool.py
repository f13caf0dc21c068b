"""Pages of the KV cache: which are free, in use, or idle: known as a prefix and used by nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from localgen.backends.runner.interface import NoRoom

PAGE_TOKENS = 16


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Pages 0 to num_pages - 1, each with any number of users; every call takes constant time
    a page.

    A page without users is free, unless the tree of prefixes keeps it: then it is idle.
    """

    def __init__(self, num_pages: int) -> None:
        self._ref_counts = [0] * num_pages
        self._free = list(reversed(range(num_pages)))
        self._cached: set[int] = set()
        self._idle: dict[int, None] = {}  # in the order in which they were last used

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages that only the tree keeps."""
        return len(self._idle)

    def can_write(self, page: int) -> bool:
        """Whether a page has one user, and what is in it is not known as a prefix."""
        return self._ref_counts[page] == 1 and page not in self._cached

    def allocate(self, count: int) -> list[int]:
        """Free pages, with one user from now on. NoRoom: there are fewer."""
        if count > len(self._free):
            raise NoRoom
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._ref_counts[page] = 1
        return taken

    def acquire(self, pages: Sequence[int]) -> None:
        """One more user for each of these, none of which is free."""
        for page in pages:
            if self._ref_counts[page] == 0:
                del self._idle[page]
            self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each of these pages of one text, in its order.

        The last becomes idle first: what comes before it can be of use without it.
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
        """The tree knows what is in this page, which has a user."""
        assert self._ref_counts[page] > 0, page
        assert page not in self._cached, page
        self._cached.add(page)

    def least_recent_idle(self, count: int) -> list[int]:
        """The idle pages that were used least recently; fewer if there are not so many."""
        return list(islice(self._idle, max(0, count)))

    def evict(self, page: int) -> None:
        """An idle page is free."""
        del self._idle[page]
        self._cached.remove(page)
        self._free.append(page)

    def check(self, ref_counts: Mapping[int, int], cached: set[int]) -> None:
        """Assert that every page is free, idle or in use, and that these are the users and the
        pages of the tree. For tests."""
        assert self._ref_counts == [ref_counts.get(page, 0) for page in range(self.num_pages)]
        assert self._cached == cached
        unused = {page for page, count in enumerate(self._ref_counts) if count == 0}
        assert set(self._idle) == unused & cached
        assert sorted(self._free) == sorted(unused - cached)
