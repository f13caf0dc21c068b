"""Split a response into reasoning, content and tool calls, incrementally."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localgen.backends.text.reasoning import ReasoningParser
from localgen.backends.text.tool_parser import ToolCallParser
from localgen.backends.types import ToolCallDelta


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """New text and tool calls since the last delta."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ResponseParser:
    """Parses one response.

    control_pieces: bytes of the control tokens to treat as text. reasoning: None: the response has
    none.
    """

    def __init__(
        self,
        control_pieces: Mapping[int, bytes],
        reasoning: ReasoningParser | None,
        tool_calls: ToolCallParser | None,
    ) -> None:
        self.control_pieces = control_pieces
        self.reasoning = reasoning
        self._tool_calls = tool_calls

    @property
    def has_tool_calls(self) -> bool:
        """True if the response contains a tool call."""
        return self._tool_calls is not None and self._tool_calls.num_calls > 0

    def feed(self, text: str) -> ParsedDelta:
        """Feed text; return the parts that can no longer change."""
        reasoning, text = self.reasoning.feed(text) if self.reasoning else ("", text)
        return self._parse(reasoning, text)

    def finish(self) -> ParsedDelta:
        """Return the remaining parts at the end of the response."""
        reasoning, text = self.reasoning.finish() if self.reasoning else ("", "")
        parts = self._parse(reasoning, text)
        if self._tool_calls is None:
            return parts
        text, calls = self._tool_calls.finish()
        return ParsedDelta(parts.content + text, reasoning, (*parts.tool_calls, *calls))

    def _parse(self, reasoning: str, text: str) -> ParsedDelta:
        if self._tool_calls is None:
            return ParsedDelta(text, reasoning)
        content, calls = self._tool_calls.feed(text)
        return ParsedDelta(content, reasoning, tuple(calls))
