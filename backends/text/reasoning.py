"""What a model thinks before it answers, told apart from the answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from localgen.backends.text.pattern import SPACE, PartialPattern


class _ReasoningState(enum.Enum):
    """How far an answer has come. AFTER_CLOSE: nothing but white space has followed thoughts."""

    BEFORE = enum.auto()
    INSIDE = enum.auto()
    AFTER_CLOSE = enum.auto()
    DONE = enum.auto()


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """What stands around thoughts. control_tokens: the texts among them that may be control
    tokens."""

    open: str
    close: str
    control_tokens: tuple[str, ...]

    def is_open_after(self, prompt: str) -> bool:
        """Whether a prompt ends within thoughts, so that the answer begins with them."""
        return prompt.rstrip().endswith(self.open)

    def is_closed_after(self, prompt: str) -> bool:
        """Whether a prompt ends behind thoughts, so that none come."""
        return prompt.rstrip().endswith(self.close)


_KNOWN_TAGS = (
    ThinkingTags("<think>", "</think>", ("<think>", "</think>")),
    ThinkingTags("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    ThinkingTags("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
)


def detect_thinking_tags(source: str) -> ThinkingTags | None:
    """The tags that a chat template knows, if any."""
    return next((tags for tags in _KNOWN_TAGS if tags.open in source or tags.close in source), None)


class ReasoningParser:
    """Thoughts at the beginning of an answer; tags anywhere else are text like any other.

    is_open: the prompt has opened them. White space around thoughts is dropped.
    """

    def __init__(self, tags: ThinkingTags, *, is_open: bool) -> None:
        self._open_pattern = PartialPattern((SPACE, tags.open))
        self._close = tags.close
        self._state = _ReasoningState.INSIDE if is_open else _ReasoningState.BEFORE
        self._has_output = False
        self._buffer = ""

    def feed(self, text: str) -> tuple[str, str]:
        """New thoughts, and new text of the answer."""
        if self._state is _ReasoningState.DONE:
            return "", text
        self._buffer += text
        if self._state is _ReasoningState.BEFORE:
            self._find_open_tag()
        thoughts = self._take_reasoning() if self._state is _ReasoningState.INSIDE else ""
        if self._state is _ReasoningState.AFTER_CLOSE:
            self._buffer = self._buffer.lstrip()
            self._state = _ReasoningState.DONE if self._buffer else _ReasoningState.AFTER_CLOSE
        answer = self._buffer if self._state is _ReasoningState.DONE else ""
        self._buffer = self._buffer[len(answer) :]
        return thoughts, answer

    def finish(self) -> tuple[str, str]:
        """What is held back when the answer ends: thoughts, and text of the answer."""
        rest, self._buffer = self._buffer, ""
        return (rest.rstrip(), "") if self._state is _ReasoningState.INSIDE else ("", rest)

    def _find_open_tag(self) -> None:
        found = self._open_pattern.match(self._buffer)
        if found:
            self._state, self._buffer = _ReasoningState.INSIDE, self._buffer[found.end() :]
        elif not self._open_pattern.may_match(self._buffer):
            self._state = _ReasoningState.DONE

    def _take_reasoning(self) -> str:
        if not self._has_output:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(self._close)
        if at >= 0:
            thoughts, self._buffer = (
                self._buffer[:at].rstrip(),
                self._buffer[at + len(self._close) :],
            )
            self._state = _ReasoningState.AFTER_CLOSE
            return thoughts
        thoughts = self._buffer[: len(self._buffer) - self._partial_close_len()].rstrip()
        self._buffer = self._buffer[len(thoughts) :]
        self._has_output = self._has_output or bool(thoughts)
        return thoughts

    def _partial_close_len(self) -> int:
        """Length of the longest end of the held text with which the closing tag begins."""
        longest = min(len(self._close) - 1, len(self._buffer))
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if self._close.startswith(self._buffer[-n:])), 0)
