"""Answers as rows of segments: Markdown, reasoning, and what else a turn consists of."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from rich.theme import Theme

from localgen.backends.terminal_text import ProseStream
from localgen.tui.chat.rows import MUTED, PROMPT, WARNING, Row

if TYPE_CHECKING:
    from localgen.tui.chat.markdown_document import CodeStyle

# line ends for selections of text, but not for the parser
_LINE_ENDS = str.maketrans({"\u2028": "\n", "\u2029": "\n"})


class SafeMarkdown(ProseStream):
    """Escapes control characters, and converts line ends that the parser does not recognize."""

    def feed(self, piece: str, *, last: bool = False) -> str:
        return super().feed(piece, last=last).translate(_LINE_ENDS)


class RowRenderer:
    """Renders to rows of a width in cells, in the colours of a theme.

    colours: `theme_variables` of the app.
    """

    def __init__(self, width: int, colours: Mapping[str, str]) -> None:
        self.width = max(width, 8)
        self._colours = {name: _rich_colour(colour) for name, colour in colours.items()}
        self._console = Console(
            width=self.width,
            file=io.StringIO(),
            color_system="truecolor",
            force_terminal=True,
            legacy_windows=False,
            theme=_rich_theme(self._colours),
        )
        self._code_style: CodeStyle | None = None
        self._styles: dict[Style | None, Style | None] = {}  # equal ones are kept once

    def text(self, text: Text, style: str, *, indent: int = 1) -> list[Row]:
        """Rows of a text that is wrapped. style: of the whole rows, a name in the theme below."""
        rows = self._console.render_lines(Padding(text, (0, 1, 0, indent), style=style))
        return [self._row(row) for row in rows]

    def reasoning(self, text: str) -> list[Row]:
        """Rows of a piece of reasoning."""
        return self.text(Text(text), MUTED, indent=3)

    def markdown(self, source: str) -> list[Row]:
        """Rows of a block of Markdown."""
        # takes a tenth of the start, and the first screen may have no answer
        from localgen.tui.chat import markdown_document

        self._code_style = self._code_style or markdown_document.CodeStyle(self._colours)
        rows = markdown_document.rows(self._console, source, self._code_style, self.width - 2)
        return [self._row((Segment(" "), *row)) for row in rows]

    def _row(self, segments: Iterable[Segment]) -> Row:
        return tuple(
            Segment(text, self._styles.setdefault(style, style)) for text, style, _ in segments
        )


def _rich_colour(colour: str) -> str:
    """Rich's name of a colour of Textual, which begins with `ansi_` if it is the terminal's."""
    return "default" if colour == "transparent" else colour.removeprefix("ansi_")


def _rich_theme(colours: Mapping[str, str]) -> Theme:
    primary, muted, accent = colours["primary"], colours["muted"], colours["accent"]
    return Theme(
        {
            PROMPT: f"on {colours['panel']}",
            MUTED: muted,
            WARNING: colours["warning"],
            "prompt.mark": f"bold {primary}",
            "markdown.h1": f"bold underline {primary}",
            "markdown.h2": f"bold {primary}",
            "markdown.h3": f"bold {accent}",
            "markdown.h4": "bold underline",
            "markdown.h5": "bold",
            "markdown.h6": "italic",
            "markdown.code": f"{accent} on {colours['surface']}",
            "markdown.block_quote": muted,
            "markdown.list": "none",
            "markdown.item.bullet": primary,
            "markdown.item.number": primary,
            "markdown.hr": muted,
            "markdown.link": primary,
            "markdown.link_url": f"underline {muted}",
            "markdown.table.border": muted,
            "markdown.table.header": f"bold {primary}",
        }
    )
