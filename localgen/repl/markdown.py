"""Blocks of Markdown answers as rows for the REPL."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from localgen.chat import markup


def render_block(console: Console, source: str) -> list[list[Segment]]:
    """Render a block to rows, without leading and trailing blank rows and trailing spaces."""
    return markup.document_rows(console, _Document(source))


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


class _Document(markup.Document):
    elements: ClassVar = {
        **markup.Document.elements,
        "fence": _FencedCode,
        "code_block": _FencedCode,
    }
