"""One turn of a transcript: what was asked, thought, answered, and how it was served."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownStream

from localgen.chats.conversation import Turn
from localgen.chats.inert import inert
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

    def compose(self) -> ComposeResult:
        yield Static(_asked(self.turn.prompt), classes="asked", markup=False)
        with Collapsible(title=_thought_title(self._thought), collapsed=True) as thinking:
            yield Static(Content(inert(self._thought)), markup=False)
        thinking.display = bool(self._thought)
        yield ModelMarkdown(self.turn.answer)
        served = Static(Content(inert(self.turn.served)), classes="served", markup=False)
        served.set_class(self.turn.stopped, "cut")
        served.display = bool(self.turn.served)
        yield served

    async def add(self, thought: str, text: str) -> None:
        """More of an answer that grows."""
        if thought:
            self._thought += thought
            self._show_thought()
        if text:
            if self._stream is None:
                self._stream = Markdown.get_stream(self.query_one(ModelMarkdown))
            await self._stream.write(harmless(text))

    async def finish(self, turn: Turn) -> None:
        """Nothing is added any more; this is how it was served."""
        self.turn = turn
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        served = self.query_one(".served", Static)
        served.update(Content(inert(turn.served)))
        served.set_class(turn.stopped, "cut")
        served.display = bool(turn.served)

    def toggle_thought(self) -> None:
        thinking = self.query_one(Collapsible)
        if thinking.display:
            thinking.collapsed = not thinking.collapsed

    async def on_unmount(self) -> None:
        if self._stream is not None:
            await self._stream.stop()

    def _show_thought(self) -> None:
        thinking = self.query_one(Collapsible)
        thinking.display = True
        thinking.title = _thought_title(self._thought)
        self.query_one("Collapsible Static", Static).update(Content(inert(self._thought)))


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
    return Content.assemble(mark, (begin, "bold"), (more, "$text-muted"))


def _thought_title(thought: str) -> str:
    return f"thought, {len(thought.split()):,} words"
