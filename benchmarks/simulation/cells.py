"""The cells of llama.cpp's shared context."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.simulation.request import Segment

# llama_kv_cache::get_n_kv
_PADDING = 256


class Cells:
    """Each token of a segment has a cell, the first that was free: llama_kv_cache::find_slot."""

    def __init__(self, capacity: int) -> None:
        self._is_free = np.ones(capacity, np.bool_)
        self._by_segment: dict[int, np.ndarray] = {}

    def take(self, segment: Segment) -> None:
        found = np.flatnonzero(self._is_free)[: segment.tokens]
        assert len(found) == segment.tokens, (len(found), segment.tokens)
        self._is_free[found] = False
        self._by_segment[segment.key] = found

    def free(self, key: int) -> None:
        self._is_free[self._by_segment.pop(key)] = True

    def num_scanned(self, uncomputed: Mapping[int, int]) -> int:
        """Cells that attention passes over: all up to the last one in use, and some more.

        uncomputed: tokens at the ends of segments, by key, that use none so far.
        """
        last = -1
        for key, cells in self._by_segment.items():
            if computed := len(cells) - uncomputed.get(key, 0):
                last = max(last, int(cells[computed - 1]))
        return -(-(last + 1) // _PADDING) * _PADDING
