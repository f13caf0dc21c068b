"""One turn of a transcript: prompt, reasoning, answer and summary line."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownStream

from localgen.backends.terminal_text import escape_control_chars
from localgen.chat.conversation import Turn
from localgen.tui.chat.markdown import ModelMarkdown, SafeMarkdown

_PROMPT_LINES = 12
_PROMPT_CHARS = 2_000


class TurnView(Vertical):
    """A complete turn, or one in progress: append() adds to it, finish() completes it."""

    DEFAULT_CSS = """
    TurnView { height: auto; margin: 0 0 1 0; }
    TurnView > .prompt { height: auto; padding: 0 1; background: $panel; }
    TurnView > Collapsible { border: none; padding: 0; margin: 0; background: transparent; }
    TurnView > Collapsible > CollapsibleTitle { padding: 0 1; color: $text-muted; }
    TurnView > Collapsible > Contents { padding: 0 0 0 3; }
    TurnView > Collapsible Static { color: $text-muted; }
    TurnView > ModelMarkdown { padding: 0 1; margin: 0; }
    TurnView > .summary { height: auto; padding: 0 1; color: $text-muted; }
    TurnView > .cut { color: $warning; }
    """

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.turn = turn
        self._reasoning = turn.reasoning
        self._stream: MarkdownStream | None = None
        self._safe = SafeMarkdown()
        self._reasoning_text = Static(markup=False)
        self._reasoning_box = Collapsible(self._reasoning_text, collapsed=True)
        self._answer_markdown = ModelMarkdown(turn.answer)
        self._summary = Static(classes="summary", markup=False)
        self._show_reasoning()
        self._show_summary()

    def compose(self) -> ComposeResult:
        yield Static(_prompt_content(self.turn.prompt), classes="prompt", markup=False)
        yield self._reasoning_box
        yield self._answer_markdown
        yield self._summary

    async def append(self, reasoning: str, text: str) -> None:
        """Append to an answer in progress."""
        if reasoning:
            self._reasoning += reasoning
            self._show_reasoning()
        if text:
            if self._stream is None:
                self._stream = Markdown.get_stream(self._answer_markdown)
            await self._stream.write(self._safe.feed(text))

    async def finish(self, turn: Turn) -> None:
        """Complete the answer and show its summary."""
        self.turn = turn
        if self._stream is not None:
            await self._stream.write(self._safe.feed("", last=True))
            await self._stream.stop()
            self._stream = None
        self._show_summary()

    def toggle_reasoning(self) -> None:
        if self._reasoning_box.display:
            self._reasoning_box.collapsed = not self._reasoning_box.collapsed

    async def on_unmount(self) -> None:
        if self._stream is not None:
            await self._stream.stop()

    def _show_reasoning(self) -> None:
        self._reasoning_box.display = bool(self._reasoning)
        self._reasoning_box.title = f"reasoning, {len(self._reasoning.split()):,} words"
        self._reasoning_text.update(Content(escape_control_chars(self._reasoning)))

    def _show_summary(self) -> None:
        self._summary.update(Content(escape_control_chars(self.turn.summary)))
        self._summary.set_class(self.turn.stopped, "cut")
        self._summary.display = bool(self.turn.summary)


def _prompt_content(prompt: str) -> Content:
    """The prompt, or the first lines of a long one."""
    shown = escape_control_chars(prompt)
    lines = shown.split("\n")
    begin = "\n".join(lines[:_PROMPT_LINES])[:_PROMPT_CHARS]
    rest = len(shown) - len(begin)
    mark = Content.styled("› ", "bold $primary")
    if rest <= 0:
        return Content.assemble(mark, (begin, "bold"))
    more = f"\n… {rest:,} characters more, {len(lines):,} lines in all"
    return Content.assemble(mark, (begin, "bold"), (more, "dim"))
