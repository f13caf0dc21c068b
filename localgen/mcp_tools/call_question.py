"""The question about a tool call, and its answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Decision(enum.Enum):
    """The user's answer to the question about a call."""

    ONCE = "once"
    ALWAYS = "always"  # each call of this tool in this chat
    REFUSE = "refuse"
    STOP = "stop"  # the answer
    NOBODY_ASKED = "nobody asked"  # as there is no terminal


_DECISIONS = {
    **dict.fromkeys(("y", "yes"), Decision.ONCE),
    **dict.fromkeys(("a", "always"), Decision.ALWAYS),
    **dict.fromkeys(("n", "no"), Decision.REFUSE),
}
_SHOW_ALL = ("s", "show", "show all")


@dataclass(frozen=True, slots=True)
class CallQuestion:
    """A call that the user has not allowed yet.

    arguments: for the terminal, with long values cut. whole_arguments: uncut.
    """

    title: str
    arguments: str
    whole_arguments: str

    @property
    def is_cut(self) -> bool:
        """Whether `arguments` leaves something out."""
        return self.arguments != self.whole_arguments

    def text(self, always: str) -> str:
        """The question for a line of input. always: the answer that allows all later calls."""
        show = ", [s]how all" if self.is_cut else ""
        return f"run it? [y]es, {always}, [n]o{show}: "

    def asks_for_all(self, typed: str) -> bool:
        """Whether an answer asks for the arguments that were left out."""
        return self.is_cut and typed.strip().lower() in _SHOW_ALL


def parse_decision(typed: str) -> Decision | None:
    """The answer to a question, a whole word or its first letter; None if it is none."""
    return _DECISIONS.get(typed.strip().lower())
