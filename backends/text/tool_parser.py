"""Text of an answer, parted into content and calls as it comes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable

from localgen.backends.text.pattern import Pattern
from localgen.backends.text.tool_format import Format, Shape
from localgen.backends.types import Tool, ToolCallDelta

# nine letters and digits: Mistral's templates take no other
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


def new_call_id() -> str:
    """An id for a call, not given before."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


class CallParser:
    """Reads the calls of one answer; what is no call, or a malformed one, is content.

    A call is told of as soon as its name and the beginning of its arguments are there; the
    arguments are passed on as they come. White space around calls is dropped.
    `num_calls`: how many there are so far.
    """

    def __init__(self, format: Format, tools: Iterable[Tool]) -> None:
        self._shapes = format.shapes
        self._tools = {tool.name: tool for tool in tools}
        self._held = ""
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._shape = format.shapes[0]
        self._arguments = self._shape.arguments(Tool(""))
        # a state is a method that takes what it can of the held text, and says whether to go on
        self._state: Callable[[], bool] = self._at_start if format.leads else self._in_text
        self._leads = format.leads
        self._blank = ""  # white space that is content if other content follows
        self._is_behind_call = False
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Content and calls that are certain by now."""
        self._held += text
        while self._state():
            pass
        return self._taken()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """What is left when the answer ends."""
        if self._state == self._in_arguments:
            self._say(self._arguments.finish(self._held))
        elif not any(pattern.may_come(self._held) for pattern in self._closers()):
            self._show(len(self._held))
        if not self._is_behind_call:
            self._content.append(self._blank)
        return self._taken()

    def _taken(self) -> tuple[str, list[ToolCallDelta]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    # -- states -----------------------------------------------------------------------------

    def _at_start(self) -> bool:
        """Nothing has been said yet, and calls begin here or nowhere."""
        if self._begins(0):
            return True
        if any(shape.opening.may_come(self._held) for shape in self._shapes):
            return False
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        at = -1 if self._leads else self._held.find(self._lead)
        while at >= 0:
            if self._begins(at):
                return True
            if any(shape.opening.may_come(self._held, at) for shape in self._shapes):
                self._show(at)
                return False
            at = self._held.find(self._lead, at + 1)
        self._show(len(self._held))
        return False

    def _in_arguments(self) -> bool:
        piece, self._held = self._arguments.feed(self._held)
        self._say(piece)
        if self._arguments.is_done:
            self._state = self._behind_arguments
        return self._arguments.is_done

    def _behind_arguments(self) -> bool:
        found = self._shape.closing.match(self._held)
        if found:
            self._drop(found.end())
            self._state = self._between if self._shape.join else self._in_text
            return True
        return self._go_on_in_text()

    def _between(self) -> bool:
        """Behind a call of a section that may hold another."""
        ending = self._shape.ending
        found = ending.match(self._held) if ending else None
        if found:
            self._drop(found.end())
            self._state = self._in_text
            return True
        joining = self._shape.joining
        if joining and self._enter(self._shape, joining, 0):
            return True
        if joining and joining.may_come(self._held):
            return False
        return self._go_on_in_text()

    # -- steps ------------------------------------------------------------------------------

    @property
    def _lead(self) -> str:
        """With what a section begins, if it may stand behind text."""
        return str(self._shapes[0].open[0])[0]

    def _begins(self, at: int) -> bool:
        """Whether the first call of a section begins there; then its arguments are next."""
        return any(self._enter(shape, shape.opening, at) for shape in self._shapes)

    def _enter(self, shape: Shape, pattern: Pattern, at: int) -> bool:
        found = pattern.match(self._held, at)
        tool = self._tools.get(found[1]) if found else None
        if found is None or tool is None:
            return False
        self._show(at)
        self._blank, self._is_behind_call = "", True
        self._drop(found.end() - at)
        self._shape, self._arguments = shape, shape.arguments(tool)
        self._calls.append(ToolCallDelta(self.num_calls, "", new_call_id(), tool.name))
        self.num_calls += 1
        self._state = self._in_arguments
        return True

    def _go_on_in_text(self) -> bool:
        """The section does not go on as it should, unless that is still to come."""
        if any(pattern.may_come(self._held) for pattern in self._closers()):
            return False
        self._state = self._in_text
        return True

    def _closers(self) -> list[Pattern]:
        """What may come next and is worth nothing to anybody."""
        if self._state == self._behind_arguments:
            return [self._shape.closing]
        if self._state == self._between and self._shape.ending:
            return [self._shape.ending]
        return []

    def _say(self, piece: str) -> None:
        if piece:
            self._calls.append(ToolCallDelta(self.num_calls - 1, piece))

    def _show(self, length: int) -> None:
        text = self._blank + self._held[:length]
        self._drop(length)
        text = text.lstrip() if self._is_behind_call else text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._is_behind_call = False
            self._content.append(shown)

    def _drop(self, length: int) -> None:
        self._held = self._held[length:]
