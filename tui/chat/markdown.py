"""Answers as rows of segments: Markdown, reasoning, and what else a turn consists of."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import ClassVar

from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from localgen.backends.terminal_text import ProseStream
from localgen.chat import markup

# keys of a segment's meta: what a click on it does
COPY, FOLD = "copy", "fold"
# styles of whole rows
PROMPT, MUTED, WARNING = "prompt", "muted", "warning"
# line ends for selections of text, but not for the parser
_LINE_ENDS = str.maketrans({"\u2028": "\n", "\u2029": "\n"})


class SafeMarkdown(ProseStream):
    """Escapes control characters, and converts line ends that the parser does not recognize."""

    def feed(self, piece: str, *, last: bool = False) -> str:
        return super().feed(piece, last=last).translate(_LINE_ENDS)


# not a Strip, which has seven caches: of a long answer the garbage collector would visit all
Row = tuple[Segment, ...]


class RowRenderer:
    """Renders to rows of a width in cells, in the colours of a theme.

    colours: `theme_variables` of the app.
    """

    def __init__(self, width: int, colours: Mapping[str, str]) -> None:
        self.width = max(width, 8)
        colours = {name: _rich_colour(colour) for name, colour in colours.items()}
        self._console = Console(
            width=self.width,
            file=io.StringIO(),
            color_system="truecolor",
            force_terminal=True,
            legacy_windows=False,
            theme=_rich_theme(colours),
        )
        self._code = _CodeStyle(colours)
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
        document = _Document(source, self._code)
        rows = markup.document_rows(self._console, document, self.width - 2)
        return [self._row((Segment(" "), *row)) for row in rows]

    def _row(self, segments: Iterable[Segment]) -> Row:
        return tuple(
            Segment(text, self._styles.setdefault(style, style)) for text, style, _ in segments
        )


def row_text(row: Row) -> str:
    """The text of a row, without trailing spaces."""
    return "".join(segment.text for segment in row).rstrip()


class _CodeStyle:
    """Styles of code blocks."""

    def __init__(self, colours: Mapping[str, str]) -> None:
        def colour(name: str, **attributes: bool) -> Style:
            return Style(color=colours[name], **attributes)  # type: ignore[arg-type]

        self.background = Style(bgcolor=Color.parse(colours["surface"]))
        self.head = Style(color=colours["muted"], bgcolor=colours["panel"])
        # by the names of Pygments' tokens
        self.syntax = ANSISyntaxTheme(
            {
                ("Comment",): colour("muted", italic=True),
                ("Keyword",): colour("primary"),
                ("Keyword", "Constant"): colour("accent"),
                ("Keyword", "Type"): colour("secondary"),
                ("Operator", "Word"): colour("primary"),
                ("Name", "Builtin"): colour("secondary"),
                ("Name", "Function"): colour("foreground", bold=True),
                ("Name", "Class"): colour("foreground", bold=True),
                ("Name", "Decorator"): colour("accent"),
                ("Name", "Exception"): colour("secondary"),
                ("Name", "Attribute"): colour("secondary"),
                ("Name", "Tag"): colour("primary"),
                ("Literal", "String"): colour("success"),
                ("Literal", "Number"): colour("accent"),
                ("Generic", "Deleted"): colour("error"),
                ("Generic", "Inserted"): colour("success"),
                ("Generic", "Heading"): colour("primary", bold=True),
                ("Error",): colour("error"),
            }
        )


class _Code(CodeBlock):
    """Code in a box: its language and a place to click that copies it, then the lines."""

    def __init__(self, lexer_name: str, code_style: _CodeStyle) -> None:
        super().__init__(lexer_name, "")
        self._code_style = code_style

    @classmethod
    def create(cls, markdown: object, token: object) -> _Code:
        assert isinstance(markdown, _Document)
        info = getattr(token, "info", "") or ""
        return cls(info.split()[0] if info.split() else "text", markdown.code_style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        head = Table.grid(expand=True)
        head.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        head.add_column(justify="right")
        language = "" if self.lexer_name == "text" else self.lexer_name
        head.add_row(language, Text("copy", Style(underline=True) + Style.from_meta({COPY: code})))
        yield Padding(head, (0, 1), style=self._code_style.head)
        syntax = Syntax(
            code, self.lexer_name, theme=self._code_style.syntax, word_wrap=True, tab_size=4
        )
        yield Padding(syntax, (0, 1), style=self._code_style.background)


class _Heading(Heading):
    """A heading at the left; its style tells its level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _Document(markup.Document):
    elements: ClassVar = {
        **markup.Document.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, source: str, code_style: _CodeStyle) -> None:
        super().__init__(source)
        self.code_style = code_style


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
