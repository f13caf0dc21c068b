"""A rate measured on this machine."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest measurement


class ByteRate:
    """Moving average of the time that a byte takes."""

    def __init__(self) -> None:
        self._s_per_byte = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Record a measurement."""
        found = seconds / max(1, num_bytes)
        old = self._s_per_byte
        self._s_per_byte = found if not old else old + _WEIGHT * (found - old)

    def ms(self, num_bytes: int) -> float:
        """Expected time in ms; 0 if nothing was measured."""
        return self._s_per_byte * num_bytes * 1e3
