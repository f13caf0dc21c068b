"""Markdown of answers as Rich renders it: code in boxes, headings at the left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading
from rich.padding import Padding
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text

from localgen.chat import markup
from localgen.tui.chat.rows import COPY


def rows(console: Console, source: str, code_style: CodeStyle, width: int) -> list[markup.Row]:
    """Rows of a block of Markdown, of a width in cells."""
    return markup.document_rows(console, _Document(source, code_style), width)


class CodeStyle:
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

    def __init__(self, lexer_name: str, code_style: CodeStyle) -> None:
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

    def __init__(self, source: str, code_style: CodeStyle) -> None:
        super().__init__(source)
        self.code_style = code_style
