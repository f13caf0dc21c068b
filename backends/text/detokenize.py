"""Token bytes to text, as they come, never cutting a character."""

from __future__ import annotations

import codecs

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Bytes of one answer in, whole characters out.

    A character split over tokens is held back until it is complete; bytes that can never
    become one turn into U+FFFD. What is incomplete when the answer ends is dropped.
    """

    def __init__(self) -> None:
        self._decoder = _DECODER(errors="replace")

    def feed(self, piece: bytes) -> str:
        """Text completed by these bytes."""
        return self._decoder.decode(piece)
