"""Arguments of a call as they come, turned into pieces of JSON."""

from __future__ import annotations

from typing import Protocol


class Arguments(Protocol):
    """Reads the arguments of one call. `is_done`: what was fed last went beyond their end."""

    is_done: bool

    def feed(self, text: str) -> tuple[str, str]:
        """The next piece of JSON, and the text that is not part of it or not decided yet.

        What is left over has to come again, in front of the next text.
        """
        ...

    def finish(self, rest: str) -> str:
        """The last piece, where the answer ends within them; rest: what was left over."""
        ...


class JsonArguments:
    """A JSON object, passed on as it stands until its last brace."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> tuple[str, str]:
        """As Arguments.feed."""
        for at, char in enumerate(text):
            if self._in_string:
                self._within_string(char)
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_done = True
                    return text[: at + 1], text[at + 1 :]
            elif char == '"':
                self._in_string = True
        return text, ""

    def finish(self, rest: str) -> str:
        """As Arguments.finish."""
        return rest

    def _within_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
