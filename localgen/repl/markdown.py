"""Incremental Markdown: split a stream into complete blocks and the unfinished rest.

CommonMark closes blocks line by line and never reopens one, so every top-level block but the
last is final as soon as a line after it is complete, regardless of how the text was chunked.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from localgen.chat import markup

_PARSER = markup.create_markdown_parser()


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


def render_block(console: Console, source: str) -> list[list[Segment]]:
    """Render a block to rows, without leading and trailing blank rows and trailing spaces."""
    rows = console.render_lines(_Document(source), pad=False)
    trimmed = [_strip_trailing_blanks(row) for row in rows]
    while trimmed and not trimmed[0]:
        trimmed.pop(0)
    while trimmed and not trimmed[-1]:
        trimmed.pop()
    return trimmed


class _FencedCode(CodeBlock):
    """Code between dim fences, without padding, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name = "" if self.lexer_name == "text" else self.lexer_name
        yield Text(f"```{name}", style="dim")
        yield Syntax(
            str(self.text).rstrip(),
            self.lexer_name,
            theme="ansi_dark",
            background_color="default",
            word_wrap=True,
        )
        yield Text("```", style="dim")


class _Document(Markdown):
    elements: ClassVar = {**Markdown.elements, "fence": _FencedCode, "code_block": _FencedCode}

    def __init__(self, source: str) -> None:
        # hyperlinks=False: show the URL of a link
        super().__init__("", hyperlinks=False)
        self.parsed = list(_with_hard_breaks(_PARSER.parse(source)))


def _with_hard_breaks(tokens: list[Token]) -> Iterator[Token]:
    """Turn soft line breaks into hard ones, so that verses and addresses keep their lines."""
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
        yield token


def _strip_trailing_blanks(row: list[Segment]) -> list[Segment]:
    kept = list(row)
    while kept:
        last = kept.pop()
        text = last.text.rstrip()
        if text:
            kept.append(Segment(text, last.style, last.control))
            break
    return kept
