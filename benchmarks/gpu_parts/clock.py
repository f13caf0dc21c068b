"""Time budgets of a run and its parts, and the list of tests skipped because of them."""

from __future__ import annotations

import time
from collections.abc import Iterator


class Budget:
    """Time budget of one part, until `end_s` of the monotonic clock. cut: see Clock."""

    def __init__(self, name: str, end_s: float, cut: list[str]) -> None:
        self._name, self._end_s, self._cut = name, end_s, cut

    @property
    def left_s(self) -> float:
        """Seconds left; negative if the budget is exceeded."""
        return self._end_s - time.monotonic()

    def rounds(self, wanted: int, what: str) -> Iterator[int]:
        """Yield round numbers while another round of the same duration fits, at least one.

        Adds skipped rounds to `cut`.
        """
        for number in range(wanted):
            begun_s = time.monotonic()
            yield number
            took_s = time.monotonic() - begun_s
            if number + 1 < wanted and took_s > self.left_s:
                self._cut.append(f"{self._name}: {what}: {number + 1} of {wanted} rounds")
                return

    def fits(self, what: str, needed_s: float = 0.0) -> bool:
        """Return True if needed_s are left; otherwise add `what` to `cut`."""
        if needed_s <= self.left_s:
            return True
        self._cut.append(f"{self._name}: {what}")
        return False


class Clock:
    """Time budget of a run. cut: descriptions of the tests that were skipped for lack of time."""

    def __init__(self, total_s: float) -> None:
        self._end_s = time.monotonic() + total_s
        self.cut: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds left; negative if the budget is exceeded."""
        return self._end_s - time.monotonic()

    def seconds(self, name: str, most_s: float) -> float | None:
        """Return the seconds for a part, at most most_s; None and a line in `cut` if none left."""
        left_s = self.left_s
        if left_s <= 0:
            self.cut.append(f"{name}: all of it")
            return None
        return min(left_s, most_s)
