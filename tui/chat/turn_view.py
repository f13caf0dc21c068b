"""One turn of a transcript: what was asked, thought, answered, and how it was served."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownStream

from localgen.backends.terminal_text import inert
from localgen.chat.conversation import Turn
from localgen.tui.chat.markdown import ModelMarkdown, harmless

_PROMPT_LINES = 12
_PROMPT_CHARS = 2_000


class TurnView(Vertical):
    """A turn that is whole, or one that grows by add() and ends with finish()."""

    DEFAULT_CSS = """
    TurnView { height: auto; margin: 0 0 1 0; }
    TurnView > .asked { height: auto; padding: 0 1; background: $panel; }
    TurnView > Collapsible { border: none; padding: 0; margin: 0; background: transparent; }
    TurnView > Collapsible > CollapsibleTitle { padding: 0 1; color: $text-muted; }
    TurnView > Collapsible > Contents { padding: 0 0 0 3; }
    TurnView > Collapsible Static { color: $text-muted; }
    TurnView > ModelMarkdown { padding: 0 1; margin: 0; }
    TurnView > .served { height: auto; padding: 0 1; color: $text-muted; }
    TurnView > .cut { color: $warning; }
    """

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.turn = turn
        self._thought = turn.reasoning
        self._stream: MarkdownStream | None = None
        self._thought_text = Static(markup=False)
        self._thinking = Collapsible(self._thought_text, collapsed=True)
        self._answer = ModelMarkdown(turn.answer)
        self._served = Static(classes="served", markup=False)
        self._show_thought()
        self._show_served()

    def compose(self) -> ComposeResult:
        yield Static(_asked(self.turn.prompt), classes="asked", markup=False)
        yield self._thinking
        yield self._answer
        yield self._served

    async def add(self, thought: str, text: str) -> None:
        """More of an answer that grows."""
        if thought:
            self._thought += thought
            self._show_thought()
        if text:
            if self._stream is None:
                self._stream = Markdown.get_stream(self._answer)
            await self._stream.write(harmless(text))

    async def finish(self, turn: Turn) -> None:
        """Nothing is added any more; this is how it was served."""
        self.turn = turn
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        self._show_served()

    def toggle_thought(self) -> None:
        if self._thinking.display:
            self._thinking.collapsed = not self._thinking.collapsed

    async def on_unmount(self) -> None:
        if self._stream is not None:
            await self._stream.stop()

    def _show_thought(self) -> None:
        self._thinking.display = bool(self._thought)
        self._thinking.title = f"thought, {len(self._thought.split()):,} words"
        self._thought_text.update(Content(inert(self._thought)))

    def _show_served(self) -> None:
        self._served.update(Content(inert(self.turn.served)))
        self._served.set_class(self.turn.stopped, "cut")
        self._served.display = bool(self.turn.served)


def _asked(prompt: str) -> Content:
    """The prompt, or the beginning of a long one."""
    shown = inert(prompt)
    lines = shown.split("\n")
    begin = "\n".join(lines[:_PROMPT_LINES])[:_PROMPT_CHARS]
    rest = len(shown) - len(begin)
    mark = Content.styled("› ", "bold $primary")
    if rest <= 0:
        return Content.assemble(mark, (begin, "bold"))
    more = f"\n… {rest:,} characters more, {len(lines):,} lines in all"
    return Content.assemble(mark, (begin, "bold"), (more, "dim"))
