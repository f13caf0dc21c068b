"""One prompt to several models or settings, their answers side by side with their speeds."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, HorizontalScroll, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Button, Static, TextArea

from localgen.backends import units
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import inert, one_line
from localgen.backends.types import SamplingParams
from localgen.chat import parameters
from localgen.chat.session import BUILT_IN
from localgen.chat.session_store import Kept
from localgen.tui.chat.active_session import OpenSession
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.transcript import READING, Transcript
from localgen.tui.widgets.dialog import Dialog
from localgen.tui.widgets.footer import Keys
from localgen.tui.widgets.text_field import TextField

MOST = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """model: None for the built-in one. settings: what is set on top, as typed."""

    model: str | None
    params: SamplingParams
    label: str


def variants(text: str, params: SamplingParams, *, is_elsewhere: bool = False) -> list[Variant]:
    """One of each line: a model, then NAME=VALUE settings. params: what they start from.

    is_elsewhere: the models are another server's. InvalidRequest names the line.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not 2 <= len(lines) <= MOST:
        raise InvalidRequest(f"give 2 to {MOST} lines, a model each; there are {len(lines)}")
    found = []
    for number, line in lines:
        try:
            found.append(_variant(line, params, is_elsewhere))
        except InvalidRequest as error:
            raise InvalidRequest(f"line {number}: {error.message}") from error
    return found


def sessions(base: Kept, compared: list[Variant]) -> list[Kept]:
    """A session for each, which goes on from the same conversation."""
    name = base.name or "Comparison"
    return [
        replace(
            base,
            name=f"{name} · {variant.label}",
            model=variant.model,
            params=variant.params,
            ctx=base.ctx if variant.model == base.model else None,
            growing=None,
        )
        for variant in compared
    ]


def _variant(line: str, params: SamplingParams, is_elsewhere: bool) -> Variant:
    try:
        model, *settings = shlex.split(line)
    except ValueError as error:
        raise InvalidRequest("close the quote") from error
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not value:
            raise InvalidRequest(f"{setting}: give NAME=VALUE, such as temperature=0")
        params = parameters.with_parameter(params, name, value, checked=not is_elsewhere)
    named = None if model == BUILT_IN and not is_elsewhere else model
    return Variant(named, params, " ".join([model, *settings]))


class CompareSetup(Dialog[list[Variant] | None]):
    """Asks what is to be compared."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Never mind"),
        Binding("ctrl+s", "go", "Compare these", priority=True),
    ]
    DEFAULT_CSS = """
    CompareSetup > Vertical {
        width: 76; max-width: 95%; height: auto; max-height: 90%; padding: 0 1;
        border: round $primary; background: $surface; border-title-color: $primary;
        border-subtitle-color: $text-muted;
    }
    CompareSetup TextArea { height: 8; margin: 1 0; border: none; padding: 0; background: $panel; }
    CompareSetup #fault { height: auto; color: $error; }
    CompareSetup Horizontal { height: auto; align-horizontal: right; }
    CompareSetup Button { margin-left: 2; }
    """

    def __init__(self, text: str, params: SamplingParams, *, is_elsewhere: bool = False) -> None:
        super().__init__()
        self._text, self._params, self._is_elsewhere = text, params, is_elsewhere

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Compare"
            box.border_subtitle = "Ctrl+S goes on, Esc: never mind"
            yield Static(
                "A line each: a model, then settings as NAME=VALUE. Each becomes a session that "
                "goes on from this one.",
                markup=False,
            )
            yield TextField(self._text, compact=True, show_line_numbers=False)
            yield Static("", id="fault", markup=False)
            with Horizontal():
                yield Button("Never mind", id="no", compact=True)
                yield Button("Compare", id="yes", variant="primary", compact=True)

    def on_mount(self) -> None:
        self.query_one(TextArea).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "yes":
            self.action_go()
        else:
            self.dismiss(None)

    def action_go(self) -> None:
        try:
            text = self.query_one(TextArea).text
            self.dismiss(variants(text, self._params, is_elsewhere=self._is_elsewhere))
        except LocalgenError as error:
            self.query_one("#fault", Static).update(Content(one_line(error.message)))


class Column(Vertical):
    """One session of a comparison."""

    DEFAULT_CSS = """
    Column {
        width: 1fr; min-width: 28; height: 1fr; border: round $border;
        border-title-color: $primary; border-title-style: bold;
    }
    Column:focus-within { border: round $primary; }
    Column > .speed { height: 1; padding: 0 1; color: $success; text-wrap: nowrap; }
    Column > .speed.-fault { color: $error; }
    """

    def __init__(self, opened: OpenSession, label: str) -> None:
        super().__init__()
        self.opened = opened
        self.transcript = Transcript()
        self._speed_line = Static("ready", classes="speed", markup=False)
        self.border_title = Content(one_line(label))
        self._said = ""

    def compose(self) -> ComposeResult:
        yield self.transcript
        yield self._speed_line

    async def on_mount(self) -> None:
        await self.transcript.show(self.opened)

    async def sync(self) -> None:
        await self.transcript.sync()
        said = self._speed()
        if said != self._said:
            self._said = said
            line = self._speed_line
            line.update(Content(said))
            last = self.opened.last
            line.set_class(bool(last and last.error and not last.is_stopping), "-fault")

    def _speed(self) -> str:
        last = self.opened.last
        if last is None:
            return "ready"
        if last.is_stopping:
            return "stopped"
        if last.error:
            return one_line(last.error)
        if last.load_share is not None:
            return f"loading {last.load_share:.0%}"
        mark = "▸ " if self.opened.is_answering else ""
        tokens = last.answer.completion_tokens if last.answer else last.tokens
        return f"{mark}{last.speed()} · {units.count(tokens, 'token')}"


class CompareScreen(Screen[None]):
    """Columns, and one prompt for all of them. The sessions stay when it closes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("ctrl+c", "stop", "Stop all", priority=True),
        Binding("ctrl+r", "again", "Ask again"),
        *READING,
    ]
    DEFAULT_CSS = """
    CompareScreen HorizontalScroll { height: 1fr; }
    """

    def __init__(self, opened: list[tuple[OpenSession, str]], tell: Callable[..., None]) -> None:
        super().__init__()
        self._opened = opened
        self._tell = tell

    def compose(self) -> ComposeResult:
        with HorizontalScroll(can_focus=False):
            for opened, label in self._opened:
                yield Column(opened, label)
        yield Prompt(lambda text: [])
        yield Keys(compact=True)

    def on_mount(self) -> None:
        prompt = self.query_one(Prompt)
        prompt.placeholder = f"Ask all {len(self._opened)}"
        prompt.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What its prompt would fold is not here."""
        return action not in ("toggle_gauges", "toggle_sessions")

    def on_screen_resume(self) -> None:
        self.refresh_bindings()  # those of the main screen are gone only now

    async def sync(self) -> None:
        for column in self.query(Column):
            await column.sync()

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        event.stop()
        self.ask(event.text)

    @work(group="ask")
    async def ask(self, text: str) -> None:
        """Ask all of them, unless one still answers."""
        if any(opened.answering is not None for opened, _ in self._opened):
            self._tell("an answer is being written: Ctrl+C stops all")
            return
        self.query_one(Prompt).sent(text)
        await self._each(lambda opened: opened.ask(text))

    @work(group="ask")
    async def action_again(self) -> None:
        await self._each(lambda opened: opened.ask_again())

    def action_stop(self) -> None:
        stopped = [opened.stop() for opened, _ in self._opened]
        if not any(stopped):
            self._tell("nothing is being written; Esc goes back, Ctrl+Q leaves")

    def action_thought(self) -> None:
        for transcript in self.query(Transcript):
            transcript.toggle_thought()

    def action_scroll(self, by: int) -> None:
        """All of them, as they are compared; by its own keys the one that has the focus."""
        for transcript in self.query(Transcript):
            transcript.page(by)

    async def action_earlier(self) -> None:
        for transcript in self.query(Transcript):
            await transcript.to_beginning()

    async def action_latest(self) -> None:
        for transcript in self.query(Transcript):
            await transcript.show_latest()

    def action_back(self) -> None:
        self.dismiss(None)

    async def _each(self, work: Callable[[OpenSession], None]) -> None:
        for opened, _ in self._opened:
            try:
                await asyncio.to_thread(work, opened)
            except LocalgenError as error:
                self._tell(inert(error.message), fault=True)
