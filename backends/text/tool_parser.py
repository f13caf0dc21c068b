"""Split the text of a response into content and tool calls, incrementally."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable

from localgen.backends.text.pattern import PartialPattern
from localgen.backends.text.tool_format import CallSyntax, ToolCallFormat
from localgen.backends.types import Tool, ToolCallDelta

# nine letters and digits, as Mistral's templates require
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


def new_call_id() -> str:
    """Return a random id for a tool call."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


class ToolCallParser:
    """Parses the tool calls of one response; unknown or malformed calls are content.

    A call is emitted when its name and the start of its arguments are complete; the arguments
    follow as they arrive. Whitespace around calls is dropped. num_calls: number of calls so far.
    """

    def __init__(self, format: ToolCallFormat, tools: Iterable[Tool]) -> None:
        self._syntaxes = format.syntaxes
        self._tools = {tool.name: tool for tool in tools}
        self._buffer = ""
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._syntax = format.syntaxes[0]
        self._arguments = self._syntax.arguments_parser(Tool(""))
        # a state is a method that consumes part of the buffer and returns whether to continue
        self._state: Callable[[], bool] = self._at_start if format.calls_first else self._in_text
        self._calls_first = format.calls_first
        self._pending_space = ""  # whitespace that is content if other content follows
        self._is_after_call = False
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Feed text; return the content and calls that can no longer change."""
        self._buffer += text
        while self._state():
            pass
        return self._drain()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Return the remaining content and calls at the end of the response."""
        if self._state == self._in_arguments:
            self._emit_arguments(self._arguments.finish(self._buffer))
        elif not any(pattern.may_match(self._buffer) for pattern in self._pending_patterns()):
            self._emit_content(len(self._buffer))
        if not self._is_after_call:
            self._content.append(self._pending_space)
        return self._drain()

    def _drain(self) -> tuple[str, list[ToolCallDelta]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    # -- states -----------------------------------------------------------------------------

    def _at_start(self) -> bool:
        """State at the start of a response whose calls can only come first."""
        if self._start_section(0):
            return True
        if any(shape.open_pattern.may_match(self._buffer) for shape in self._syntaxes):
            return False
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        at = -1 if self._calls_first else self._buffer.find(self._first_char)
        while at >= 0:
            if self._start_section(at):
                return True
            if any(shape.open_pattern.may_match(self._buffer, at) for shape in self._syntaxes):
                self._emit_content(at)
                return False
            at = self._buffer.find(self._first_char, at + 1)
        self._emit_content(len(self._buffer))
        return False

    def _in_arguments(self) -> bool:
        piece, self._buffer = self._arguments.feed(self._buffer)
        self._emit_arguments(piece)
        if self._arguments.is_done:
            self._state = self._after_arguments
        return self._arguments.is_done

    def _after_arguments(self) -> bool:
        found = self._syntax.close_pattern.match(self._buffer)
        if found:
            self._consume(found.end())
            self._state = self._between_calls if self._syntax.join else self._in_text
            return True
        return self._fall_back_to_text()

    def _between_calls(self) -> bool:
        """State after a call, in a section that may hold several."""
        ending = self._syntax.end_pattern
        found = ending.match(self._buffer) if ending else None
        if found:
            self._consume(found.end())
            self._state = self._in_text
            return True
        joining = self._syntax.join_pattern
        if joining and self._start_call(self._syntax, joining, 0):
            return True
        if joining and joining.may_match(self._buffer):
            return False
        return self._fall_back_to_text()

    # -- steps ------------------------------------------------------------------------------

    @property
    def _first_char(self) -> str:
        """First character of a section that may follow text."""
        return str(self._syntaxes[0].open[0])[0]

    def _start_section(self, start: int) -> bool:
        """Try to start a section at `start`. Returns True if the parser is now in its arguments."""
        return any(self._start_call(shape, shape.open_pattern, start) for shape in self._syntaxes)

    def _start_call(self, syntax: CallSyntax, pattern: PartialPattern, start: int) -> bool:
        found = pattern.match(self._buffer, start)
        tool = self._tools.get(found[1]) if found else None
        if found is None or tool is None:
            return False
        self._emit_content(start)
        self._pending_space, self._is_after_call = "", True
        self._consume(found.end() - start)
        self._syntax, self._arguments = syntax, syntax.arguments_parser(tool)
        self._calls.append(ToolCallDelta(self.num_calls, "", new_call_id(), tool.name))
        self.num_calls += 1
        self._state = self._in_arguments
        return True

    def _fall_back_to_text(self) -> bool:
        """Return to text if what follows the call is malformed; else wait for more text."""
        if any(pattern.may_match(self._buffer) for pattern in self._pending_patterns()):
            return False
        self._state = self._in_text
        return True

    def _pending_patterns(self) -> list[PartialPattern]:
        """Patterns that may come next and are dropped if incomplete."""
        if self._state == self._after_arguments:
            return [self._syntax.close_pattern]
        if self._state == self._between_calls and self._syntax.end_pattern:
            return [self._syntax.end_pattern]
        return []

    def _emit_arguments(self, piece: str) -> None:
        if piece:
            self._calls.append(ToolCallDelta(self.num_calls - 1, piece))

    def _emit_content(self, length: int) -> None:
        text = self._pending_space + self._buffer[:length]
        self._consume(length)
        text = text.lstrip() if self._is_after_call else text
        shown = text.rstrip()
        self._pending_space = text[len(shown) :]
        if shown:
            self._is_after_call = False
            self._content.append(shown)

    def _consume(self, length: int) -> None:
        self._buffer = self._buffer[length:]
