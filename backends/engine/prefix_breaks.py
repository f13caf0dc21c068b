"""The latest prompts, to find where a new one parts from one that has most of its text."""

from __future__ import annotations

import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from localgen.backends.prefix_break import MIN_TOKENS_AGAIN, FoundBreak, PrefixBreak
from localgen.backends.runner.sequence import common_prefix_len
from localgen.backends.terminal_text import one_line
from localgen.backends.types import Request

MAX_PROMPTS = 32
MAX_BYTES = 16 << 20
# longer prompts are neither kept nor compared
MAX_CHARS = 2 << 20
# samples of an earlier text that are searched in a new one, and the share that must be in it
_NUM_PROBES, _PROBE_CHARS = 64, 48
_MIN_SHARE = 0.75
_EXCERPT_CHARS, _LEAD_CHARS = 40, 16
# searches for messages that the template rewrote
_MAX_MISSES = 8


@dataclass(frozen=True, slots=True)
class _Prompt:
    """owner: account and cache salt; only prompts of the same owner are compared."""

    owner: tuple[str, str]
    text: str
    tokens: array[int]

    @property
    def num_bytes(self) -> int:
        return sys.getsizeof(self.text) + sys.getsizeof(self.tokens)


class RecentPrompts:
    """At most MAX_PROMPTS prompts and MAX_BYTES, the oldest leave first. Thread-safe."""

    def __init__(self) -> None:
        self._prompts: deque[_Prompt] = deque()  # newest first
        self._num_bytes = 0
        self._lock = threading.Lock()

    def compare(self, request: Request, text: str, tokens: Seq[int]) -> FoundBreak | None:
        """Keep a prompt; return where it parts from an earlier one of its account and salt.

        text: as rendered. Returns None for a prompt that continues an earlier one, that changes
        only the last message, or that shares little behind the place.
        """
        if not text or len(text) > MAX_CHARS:
            return None
        new = _Prompt((request.account, request.cache_salt), text, array("i", tokens))
        with self._lock:
            earlier = [prompt for prompt in self._prompts if prompt.owner == new.owner]
            self._keep(new)
        return _find_break(new, earlier, request)

    def _keep(self, prompt: _Prompt) -> None:
        self._prompts.appendleft(prompt)
        self._num_bytes += prompt.num_bytes
        while len(self._prompts) > MAX_PROMPTS or self._num_bytes > MAX_BYTES:
            self._num_bytes -= self._prompts.pop().num_bytes


def _find_break(new: _Prompt, earlier: list[_Prompt], request: Request) -> FoundBreak | None:
    shared = [common_prefix_len(old.tokens, new.tokens) for old in earlier]
    longest = max(shared, default=0)
    for old, token in zip(earlier, shared, strict=True):
        if len(old.tokens) - longest < MIN_TOKENS_AGAIN:
            continue  # what it has more than the others is not worth a report
        at = common_prefix_len(old.text, new.text)
        share = _share_found(old.text, new.text, at)
        tokens = round(share * (len(old.tokens) - token))
        if share < _MIN_SHARE or tokens < MIN_TOKENS_AGAIN:
            continue
        if request.messages and at >= new.text.rfind(request.messages[-1].content.strip()) >= 0:
            return None  # an edited last turn
        start, place = _place(new.text, at, request)
        found = PrefixBreak(
            place=place,
            byte=len(new.text[start:at].encode(errors="replace")),
            before=_excerpt(old.text, at),
            after=_excerpt(new.text, at),
            token=token,
            tokens=tokens,
        )
        return FoundBreak(found, old.tokens.tolist())
    return None


def _share_found(old: str, new: str, at: int) -> float:
    """The share of old[at:] that is in new[at:], by samples at even distances.

    0 once it cannot reach _MIN_SHARE: unrelated prompts cost a few searches each.
    """
    step = max(1, (len(old) - at) // _NUM_PROBES)
    starts = range(at + step // 2, len(old), step)
    misses_left = int((1 - _MIN_SHARE) * len(starts))
    misses = 0
    for start in starts:
        misses += new.find(old[start : start + _PROBE_CHARS], at) < 0
        if misses > misses_left:
            return 0.0
    return 1 - misses / len(starts) if starts else 0.0


def _place(text: str, at: int, request: Request) -> tuple[int, str]:
    """Where the part of the prompt begins that has a character of its text, and its name."""
    if request.messages is None:
        return 0, "the prompt"
    found = 0, "the tools" if request.tools else "the prompt"
    for start, name in _parts(text, request):
        if start > at:
            break
        found = start, name
    return found


def _parts(text: str, request: Request) -> Iterator[tuple[int, str]]:
    end = misses = 0
    for number, message in enumerate(request.messages or (), 1):
        content = (message.reasoning or message.content).strip()
        start = text.find(content, end)
        if start < 0:
            misses += 1
            if misses > _MAX_MISSES:
                return
            continue
        is_head = message.role == "system" and number == 1
        yield start, "the system message" if is_head else f"message {number} ({message.role})"
        end = start + len(content)
        if is_head and request.tools:
            yield end, "the tools"


def _excerpt(text: str, at: int) -> str:
    """The word at a place, or its beginning, on one line."""
    begin = max(text.rfind(blank, 0, at) + 1 for blank in " \n\t")
    begin = max(begin, at - _LEAD_CHARS)
    word = text[begin:at] + text[at : at + 1] + _first_word(text[at + 1 : begin + _EXCERPT_CHARS])
    return one_line(word)


def _first_word(text: str) -> str:
    return (text.split(None, 1) or [""])[0] if text[:1].strip() else ""
