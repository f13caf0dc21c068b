"""Answers that end at a line: by its indentation, or by the time."""

from __future__ import annotations

from localgen.backends.types import LineLimits


class LineLimiter:
    """Passes text through until one of the limits ends the answer, as llama-server does.

    An empty line has no indentation.
    """

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._indent: int | None = None  # of a line without other text so far; None: not in one
        self.has_ended = False

    def feed(self, text: str, elapsed_ms: float) -> str:
        """Return the text that can be emitted; nothing once `has_ended` is set.

        elapsed_ms: since the first token.
        """
        if self.has_ended:
            return ""
        shown = self._until_too_little_indent(text) if self._limits.min_indent else text
        if 0 < self._limits.time_ms < elapsed_ms and "\n" in shown:
            self.has_ended = True
        return shown

    def _until_too_little_indent(self, text: str) -> str:
        for at, char in enumerate(text):
            if self._indent is not None:
                if char in " \t":
                    self._indent += 1
                    continue
                if self._indent < self._limits.min_indent:
                    self.has_ended = True
                    return text[:at]
            self._indent = 0 if char == "\n" else None
        return text
