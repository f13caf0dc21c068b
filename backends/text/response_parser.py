"""Parts of an answer: thoughts, content and calls, as its text comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localgen.backends.text.reasoning import ThoughtParser
from localgen.backends.text.tool_parser import CallParser
from localgen.backends.types import ToolCallDelta


@dataclass(frozen=True, slots=True)
class Parts:
    """What is new of each."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Reader:
    """Reads one answer. pieces: the bytes of control tokens that count as text for it."""

    def __init__(
        self, pieces: Mapping[int, bytes], thoughts: ThoughtParser | None, calls: CallParser | None
    ) -> None:
        self.pieces = pieces
        self._thoughts = thoughts
        self._calls = calls

    @property
    def has_called(self) -> bool:
        """Whether the answer has made a call."""
        return self._calls is not None and self._calls.num_calls > 0

    def feed(self, text: str) -> Parts:
        """What is certain by now."""
        reasoning, text = self._thoughts.feed(text) if self._thoughts else ("", text)
        return self._parts(reasoning, text)

    def finish(self) -> Parts:
        """What is left when the answer ends."""
        reasoning, text = self._thoughts.finish() if self._thoughts else ("", "")
        parts = self._parts(reasoning, text)
        if self._calls is None:
            return parts
        text, calls = self._calls.finish()
        return Parts(parts.content + text, reasoning, (*parts.tool_calls, *calls))

    def _parts(self, reasoning: str, text: str) -> Parts:
        if self._calls is None:
            return Parts(text, reasoning)
        content, calls = self._calls.feed(text)
        return Parts(content, reasoning, tuple(calls))
