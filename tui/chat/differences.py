"""Words in which answers to the same prompt differ, lit up for a comparison."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

_PIECES = re.compile(r"\s+|\S+")
# longer answers are compared up to here: the time grows with the square of the length
MAX_WORDS = 3_000


def marked_answers(answers: Sequence[str]) -> list[Content]:
    """Each answer with the words lit that the first one does not have at that place.

    The first one is compared with the second. Answers are shown as plain text.
    """
    pieces = [_PIECES.findall(answer) for answer in answers]
    references = [pieces[min(1, len(pieces) - 1)], *[pieces[0]] * (len(pieces) - 1)]
    return [_marked(own, other) for own, other in zip(pieces, references, strict=True)]


def _marked(own: list[str], other: list[str]) -> Content:
    compared, rest = own[:MAX_WORDS], own[MAX_WORDS:]
    matcher = SequenceMatcher(None, compared, other[:MAX_WORDS], autojunk=False)
    parts: list[str | tuple[str, str]] = []
    for kind, start, end, _, _ in matcher.get_opcodes():
        text = "".join(compared[start:end])
        parts.append(text if kind == "equal" or not text.strip() else (text, "bold $accent"))
    if rest:
        parts.append(("".join(rest), "dim"))
    return Content.assemble(*parts)


class DifferencesView(VerticalScroll):
    """The last answer of one column, its differing words lit."""

    DEFAULT_CSS = """
    DifferencesView { height: 1fr; padding: 0 1; display: none; scrollbar-size-vertical: 1; }
    DifferencesView Static { height: auto; }
    """

    def __init__(self) -> None:
        super().__init__(can_focus=False)
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        yield self._text

    def show_answer(self, answer: Content) -> None:
        self._text.update(answer)
