"""Separate a model's reasoning from its answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from localgen.backends.text.pattern import SPACE, PartialPattern


class _ReasoningState(enum.Enum):
    """Parser state. AFTER_CLOSE: only whitespace has followed the closing tag so far."""

    BEFORE = enum.auto()
    INSIDE = enum.auto()
    AFTER_CLOSE = enum.auto()
    DONE = enum.auto()


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The tags around reasoning. control_tokens: the tag texts that may be control tokens."""

    open: str
    close: str
    control_tokens: tuple[str, ...]

    def is_open_after(self, prompt: str) -> bool:
        """Return True if the prompt ends with the opening tag, so the response begins inside."""
        return prompt.rstrip().endswith(self.open)

    def is_closed_after(self, prompt: str) -> bool:
        """Return True if the prompt ends with the closing tag: the response has no reasoning."""
        return prompt.rstrip().endswith(self.close)


_KNOWN_TAGS = (
    ThinkingTags("<think>", "</think>", ("<think>", "</think>")),
    ThinkingTags("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    ThinkingTags("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
)


def detect_thinking_tags(source: str) -> ThinkingTags | None:
    """Return the thinking tags used by a chat template, or None."""
    return next((tags for tags in _KNOWN_TAGS if tags.open in source or tags.close in source), None)


class ReasoningParser:
    """Extracts reasoning at the start of a response; tags elsewhere are plain text.

    is_open: the prompt ends with the opening tag. Whitespace around reasoning is dropped.
    close_tag: the closing tag. has_output: some reasoning has been returned.
    """

    def __init__(self, tags: ThinkingTags, *, is_open: bool) -> None:
        self._open_pattern = PartialPattern((SPACE, tags.open))
        self.close_tag = tags.close
        self._state = _ReasoningState.INSIDE if is_open else _ReasoningState.BEFORE
        self.has_output = False
        self._buffer = ""

    @property
    def is_open(self) -> bool:
        """True if the text so far ends inside the reasoning."""
        return self._state is _ReasoningState.INSIDE

    @property
    def is_over(self) -> bool:
        """True if no reasoning can follow."""
        return self._state in (_ReasoningState.AFTER_CLOSE, _ReasoningState.DONE)

    def feed(self, text: str) -> tuple[str, str]:
        """Return new reasoning text and new answer text."""
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
        """Return the reasoning and answer text still held back at the end of the response."""
        rest, self._buffer = self._buffer, ""
        return (rest.rstrip(), "") if self._state is _ReasoningState.INSIDE else ("", rest)

    def _find_open_tag(self) -> None:
        found = self._open_pattern.match(self._buffer)
        if found:
            self._state, self._buffer = _ReasoningState.INSIDE, self._buffer[found.end() :]
        elif not self._open_pattern.may_match(self._buffer):
            self._state = _ReasoningState.DONE

    def _take_reasoning(self) -> str:
        if not self.has_output:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(self.close_tag)
        if at >= 0:
            thoughts, self._buffer = (
                self._buffer[:at].rstrip(),
                self._buffer[at + len(self.close_tag) :],
            )
            self._state = _ReasoningState.AFTER_CLOSE
            return thoughts
        thoughts = self._buffer[: len(self._buffer) - self._partial_close_len()].rstrip()
        self._buffer = self._buffer[len(thoughts) :]
        self.has_output = self.has_output or bool(thoughts)
        return thoughts

    def _partial_close_len(self) -> int:
        """Length of the longest suffix of the buffer that is a prefix of the closing tag."""
        longest = min(len(self.close_tag) - 1, len(self._buffer))
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if self.close_tag.startswith(self._buffer[-n:])), 0)
