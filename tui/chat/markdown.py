"""Markdown from models, made safe to display without hiding any of it."""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual.widgets import Markdown

from localgen.backends.terminal_text import ProseStream
from localgen.chat import markup

# line ends for the widget, but not for its parser
_LINE_ENDS = str.maketrans({"\u2028": "\n", "\u2029": "\n"})


class SafeMarkdown(ProseStream):
    """Escapes control characters, and converts line ends that only the widget recognizes."""

    def feed(self, piece: str, *, last: bool = False) -> str:
        return super().feed(piece, last=last).translate(_LINE_ENDS)


class ModelMarkdown(Markdown):
    """A Markdown widget that shows link targets as text and opens no links."""

    DEFAULT_CSS = """
    ModelMarkdown { padding: 0; margin: 0; background: transparent; }
    ModelMarkdown MarkdownParagraph { margin: 0 0 1 0; }
    ModelMarkdown MarkdownFence { margin: 0 0 1 0; }
    ModelMarkdown MarkdownFence > Label { padding: 0 1; }
    ModelMarkdown MarkdownH1, ModelMarkdown MarkdownH2 {
        content-align: left middle; margin: 0 0 1 0; text-style: bold; background: transparent;
    }
    ModelMarkdown MarkdownList MarkdownParagraph { margin: 0; }
    ModelMarkdown > MarkdownBlock:last-child { margin: 0; }
    """

    def __init__(self, text: str | None = None) -> None:
        super().__init__(
            None if text is None else SafeMarkdown().feed(text, last=True),
            parser_factory=_parser,
            open_links=False,
        )


def _parser() -> MarkdownIt:
    made = markup.create_markdown_parser().disable(["link", "autolink"])
    made.core.ruler.push("hard_breaks", _hard_breaks)
    return made


def _hard_breaks(state: StateCore) -> None:
    """Keep single line breaks: models use them in verses and addresses."""
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
