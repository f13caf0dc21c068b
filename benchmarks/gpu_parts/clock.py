"""Time that a run and its parts may take, and what they left out because of it."""

from __future__ import annotations

import time
from collections.abc import Iterator


class Budget:
    """What one part may take, in seconds, until `end_s` of the monotonic clock."""

    def __init__(self, name: str, end_s: float, cut: list[str]) -> None:
        self._name, self._end_s, self._cut = name, end_s, cut

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative once it is overdrawn."""
        return self._end_s - time.monotonic()

    def rounds(self, wanted: int, what: str) -> Iterator[int]:
        """Numbers of the rounds: all that are wanted, if another one of the same length fits.

        There is always one. Rounds that did not fit are noted.
        """
        for number in range(wanted):
            begun_s = time.monotonic()
            yield number
            took_s = time.monotonic() - begun_s
            if number + 1 < wanted and took_s > self.left_s:
                self._cut.append(f"{self._name}: {what}: {number + 1} of {wanted} rounds")
                return

    def fits(self, what: str, needed_s: float = 0.0) -> bool:
        """Whether so much is left; if not, `what` is noted as left out."""
        if needed_s <= self.left_s:
            return True
        self._cut.append(f"{self._name}: {what}")
        return False


class Clock:
    """The budget of a run, of which every part gets one of its own. cut: what was left out."""

    def __init__(self, total_s: float) -> None:
        self._end_s = time.monotonic() + total_s
        self.cut: list[str] = []

    def part(self, name: str, most_s: float) -> Budget | None:
        """At most so many seconds of what is left; None, and noted, if nothing is."""
        now_s = time.monotonic()
        if now_s >= self._end_s:
            self.cut.append(f"{name}: all of it")
            return None
        return Budget(name, min(self._end_s, now_s + most_s), self.cut)
