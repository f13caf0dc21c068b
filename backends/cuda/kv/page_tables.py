"""Page tables of the running sequences, in one array that steps take their rows from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MIN_SLOTS, _MIN_PAGES = 8, 64


class PageTables:
    """Page tables by slot. A slot belongs to one sequence from `add` to `remove`.

    A row of the array is a table followed by zeros. The array grows as needed. version: changes
    whenever a page of a table is replaced or removed.
    """

    def __init__(self) -> None:
        self.version = 0
        self._rows = np.zeros((_MIN_SLOTS, _MIN_PAGES), np.int32)
        self._num_pages = [0] * _MIN_SLOTS
        self._free_slots = list(reversed(range(_MIN_SLOTS)))

    def add(self) -> int:
        """Return a slot with an empty table."""
        if not self._free_slots:
            old = len(self._num_pages)
            self._rows = np.vstack([self._rows, np.zeros_like(self._rows)])
            self._num_pages += [0] * old
            self._free_slots = list(reversed(range(old, 2 * old)))
        return self._free_slots.pop()

    def remove(self, slot: int) -> list[int]:
        """Free the slot; returns its pages."""
        pages = self.truncate(slot, 0)
        self._free_slots.append(slot)
        return pages

    def num_pages(self, slot: int) -> int:
        """Length of a table."""
        return self._num_pages[slot]

    def row(self, slot: int) -> NDArray[np.int32]:
        """The pages of a table, in order, int32 [pages], valid until the table is changed."""
        return self._rows[slot, : self._num_pages[slot]]

    def rows(self, slots: NDArray[np.int64], num_pages: int) -> NDArray[np.int32]:
        """The first pages of several tables, int32 [slots, num_pages], zeros after the end."""
        return self._rows[slots, :num_pages]

    def pages_at(self, slots: NDArray[np.int64], indices: NDArray[np.int32]) -> NDArray[np.int32]:
        """One page of each of several tables, int32 [slots]."""
        return self._rows[slots, indices]

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Add pages at the end."""
        first = self._num_pages[slot]
        self._num_pages[slot] = last = first + len(pages)
        if last > self._rows.shape[1]:
            added = max(self._rows.shape[1], last - self._rows.shape[1])
            self._rows = np.pad(self._rows, ((0, 0), (0, added)))
        self._rows[slot, first:last] = pages

    def replace(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Replace the pages from index `first`."""
        assert first + len(pages) <= self._num_pages[slot]
        self.version += bool(pages)
        self._rows[slot, first : first + len(pages)] = pages

    def truncate(self, slot: int, num_pages: int) -> list[int]:
        """Shorten a table to at most `num_pages` pages; returns the others."""
        row = self.row(slot)[num_pages:]
        pages: list[int] = row.tolist()
        row[:] = 0
        self.version += bool(pages)
        self._num_pages[slot] -= len(pages)
        return pages
