"""The Markdown dialect of answers: its parser, its blocks, and their rows in a terminal.

CommonMark closes blocks line by line and never reopens one, so every top-level block but the
last is final as soon as a line after it is complete, regardless of how the text was chunked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console
from rich.markdown import Markdown
from rich.segment import Segment

Row = list[Segment]


def create_markdown_parser() -> MarkdownIt:
    """Create a parser for CommonMark with tables and strikethrough.

    HTML, images, entities and reference definitions are disabled: they would hide or reorder text
    of the answer.
    """
    return (
        MarkdownIt("commonmark", {"html": False})
        .enable(["table", "strikethrough"])
        .disable(["image", "entity", "reference", "html_block", "html_inline"])
    )


_PARSER = create_markdown_parser()


def split_blocks(text: str) -> tuple[list[str], str]:
    """Return the sources of the blocks that can no longer change, and the rest of the text."""
    complete = text.rfind("\n") + 1
    starts = [
        token.map[0]
        for token in _PARSER.parse(text[:complete])
        if token.level == 0 and token.map is not None and token.nesting >= 0
    ]
    if len(starts) < 2:
        return [], text
    lines = text[:complete].split("\n")
    blocks = ["\n".join(lines[start:end]).strip("\n") for start, end in pairwise(starts)]
    rest = "\n".join(lines[starts[-1] :]) + text[complete:]
    return blocks, rest


def split_table(text: str) -> tuple[str, list[str], str] | None:
    """The header of the table that a text begins with, its other lines, and what follows it.

    None if it begins with something else.
    """
    first = next((token for token in _PARSER.parse(text) if token.map is not None), None)
    if first is None or first.map is None or first.type != "table_open":
        return None
    start, end = first.map
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    return "".join(lines[: start + 2]), lines[start + 2 : end], "".join(lines[end:])


def code_blocks(text: str) -> list[str]:
    """The contents of the code blocks of a text, in order."""
    kinds = ("fence", "code_block")
    return [token.content for token in _PARSER.parse(text) if token.type in kinds]


class Document(Markdown):
    """A Rich renderable of Markdown in this dialect. Subclasses replace Rich's elements."""

    def __init__(self, source: str) -> None:
        # hyperlinks=False: show the URL of a link
        super().__init__("", hyperlinks=False)
        self.parsed = list(_with_hard_breaks(_PARSER.parse(source)))


def document_rows(console: Console, document: Document, width: int | None = None) -> list[Row]:
    """Render to rows, without leading and trailing blank rows, and without trailing spaces.

    width: in cells; of the console if None.
    """
    options = console.options if width is None else console.options.update(width=width)
    rows = console.render_lines(document, options, pad=False)
    trimmed = [_strip_trailing_blanks(row) for row in rows]
    while trimmed and not trimmed[0]:
        trimmed.pop(0)
    while trimmed and not trimmed[-1]:
        trimmed.pop()
    return trimmed


def _with_hard_breaks(tokens: list[Token]) -> Iterator[Token]:
    """Turn soft line breaks into hard ones, so that verses and addresses keep their lines."""
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
        yield token


def _strip_trailing_blanks(row: Row) -> Row:
    kept = list(row)
    while kept:
        last = kept.pop()
        text = last.text.rstrip()
        background = last.style.bgcolor if last.style is not None else None
        if background is not None and not background.is_default:
            text = last.text  # a blank with a background is seen
        if text:
            kept.append(Segment(text, last.style, last.control))
            break
    return kept
