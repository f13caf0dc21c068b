"""Stop strings, which may span several tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text through until a stop string is found.

    Text that may be the beginning of a stop string is held back until it cannot be one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._buffer = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be emitted; nothing once `matched` is set."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        self._buffer += text
        found = [(at, stop) for stop in self._stops if (at := self._buffer.find(stop)) >= 0]
        if found:
            # the one that completes first, as if the text arrived character by character
            at, self.matched = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            shown, self._buffer = self._buffer[:at], ""
            return shown
        return self._release(self._partial_len())

    def flush(self) -> str:
        """Return the text still held back when the response ends without a stop string."""
        return self._release(0)

    def _partial_len(self) -> int:
        """Length of the longest suffix of the buffer that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(self._buffer)), 0, -1):
            if any(stop.startswith(self._buffer[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, keep: int) -> str:
        cut = len(self._buffer) - keep
        shown, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return shown
