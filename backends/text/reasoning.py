"""What a model thinks before it answers, told apart from the answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from localgen.backends.text.pattern import SPACE, Pattern


class _Place(enum.Enum):
    """How far an answer has come. BEHIND: nothing but white space has followed thoughts."""

    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()
    OVER = enum.auto()


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around thoughts. marks: the texts among them that may be control tokens."""

    open: str
    close: str
    marks: tuple[str, ...]

    def are_open(self, prompt: str) -> bool:
        """Whether a prompt ends within thoughts, so that the answer begins with them."""
        return prompt.rstrip().endswith(self.open)

    def are_over(self, prompt: str) -> bool:
        """Whether a prompt ends behind thoughts, so that none come."""
        return prompt.rstrip().endswith(self.close)


_KNOWN = (
    Tags("<think>", "</think>", ("<think>", "</think>")),
    Tags("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    Tags("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
)


def tags_of(source: str) -> Tags | None:
    """The tags that a chat template knows, if any."""
    return next((tags for tags in _KNOWN if tags.open in source or tags.close in source), None)


class ThoughtParser:
    """Thoughts at the beginning of an answer; tags anywhere else are text like any other.

    is_open: the prompt has opened them. White space around thoughts is dropped.
    """

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        self._opening = Pattern((SPACE, tags.open))
        self._close = tags.close
        self._state = _Place.INSIDE if is_open else _Place.BEFORE
        self._has_begun = False
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """New thoughts, and new text of the answer."""
        if self._state is _Place.OVER:
            return "", text
        self._held += text
        if self._state is _Place.BEFORE:
            self._look_for_opening()
        thoughts = self._inside() if self._state is _Place.INSIDE else ""
        if self._state is _Place.BEHIND:
            self._held = self._held.lstrip()
            self._state = _Place.OVER if self._held else _Place.BEHIND
        answer = self._held if self._state is _Place.OVER else ""
        self._held = self._held[len(answer) :]
        return thoughts, answer

    def finish(self) -> tuple[str, str]:
        """What is held back when the answer ends: thoughts, and text of the answer."""
        rest, self._held = self._held, ""
        return (rest.rstrip(), "") if self._state is _Place.INSIDE else ("", rest)

    def _look_for_opening(self) -> None:
        found = self._opening.match(self._held)
        if found:
            self._state, self._held = _Place.INSIDE, self._held[found.end() :]
        elif not self._opening.may_come(self._held):
            self._state = _Place.OVER

    def _inside(self) -> str:
        if not self._has_begun:
            self._held = self._held.lstrip()
        at = self._held.find(self._close)
        if at >= 0:
            thoughts, self._held = self._held[:at].rstrip(), self._held[at + len(self._close) :]
            self._state = _Place.BEHIND
            return thoughts
        thoughts = self._held[: len(self._held) - self._partial()].rstrip()
        self._held = self._held[len(thoughts) :]
        self._has_begun = self._has_begun or bool(thoughts)
        return thoughts

    def _partial(self) -> int:
        """Length of the longest end of the held text with which the closing tag begins."""
        longest = min(len(self._close) - 1, len(self._held))
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if self._close.startswith(self._held[-n:])), 0)
