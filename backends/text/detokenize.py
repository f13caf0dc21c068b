"""Incremental detokenization that never splits a character."""

from __future__ import annotations

import codecs

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes the bytes of one response into text.

    A character split over tokens is held back until it is complete. Invalid bytes become U+FFFD.
    Incomplete bytes at the end of the response are dropped.
    """

    def __init__(self) -> None:
        self._decoder = _DECODER(errors="replace")

    def feed(self, piece: bytes) -> str:
        """Return the text completed by these bytes."""
        return self._decoder.decode(piece)
