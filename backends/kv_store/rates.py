"""A rate measured on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_WEIGHT = 0.2  # of the newest measurement


class ByteRate:
    """Moving average of the time that a byte takes."""

    def __init__(self) -> None:
        self._s_per_byte = 0.0

    @contextlib.contextmanager
    def measure(self, num_bytes: int) -> Iterator[None]:
        """Measure the block, unless it raises."""
        started_s = time.perf_counter()
        yield
        found = (time.perf_counter() - started_s) / max(1, num_bytes)
        old = self._s_per_byte
        self._s_per_byte = found if not old else old + _WEIGHT * (found - old)

    def ms(self, num_bytes: int) -> float:
        """Expected time in ms; 0 if nothing was measured."""
        return self._s_per_byte * num_bytes * 1e3
