"""The screen of the tui: sessions, transcript, prompt, and at the right gauges or settings."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import Footer, Static, TextArea

from localgen.chats import commands, report
from localgen.chats.inert import one_line
from localgen.tui.chat.desk import Desk
from localgen.tui.chat.open_session import OpenSession
from localgen.tui.chat.prompt import Prompt, Suggestions
from localgen.tui.chat.session_list import Row, SessionList
from localgen.tui.chat.settings import SettingsPanel
from localgen.tui.chat.slash import Names, completions, suggestions
from localgen.tui.chat.transcript import Transcript
from localgen.tui.gauges.drawing import spread
from localgen.tui.gauges.panel import Gauges

_LIST_COLUMNS, _GAUGES_COLUMNS = 76, 118
_STYLES = {"LIVE": "$success", "LOST": "$error", "WAITING": "dim"}


class MainScreen(Screen[None]):
    """Shows the session `opened`. sync() is called many times a second while answers grow.

    server: LIVE, LOST or WAITING; told: what was last said to the user, above the prompt.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f7", "toggle_sessions", "Sessions: show or fold", show=False),
        Binding("f6", "toggle_gauges", "Gauges: show or fold", show=False),
        Binding("f5", "thought", "Thoughts of the last answer", show=False),
        Binding("pageup", "scroll(-1)", "Scroll back", show=False),
        Binding("pagedown", "scroll(1)", "Scroll on", show=False),
        Binding("ctrl+home", "earlier", "Earlier turns", show=False),
        Binding("ctrl+end", "latest", "The latest turn", show=False),
        Binding("ctrl+l", "list", "To the list of sessions", show=False),
        Binding("escape", "prompt", "Back to the prompt", show=False),
    ]
    DEFAULT_CSS = """
    MainScreen #title { height: 1; background: $panel; padding: 0 1; text-wrap: nowrap; }
    MainScreen #body { height: 1fr; }
    MainScreen #centre { width: 1fr; height: 1fr; }
    MainScreen #told { height: auto; max-height: 12; padding: 0 2; color: $text-muted;
        display: none; }
    MainScreen #told.-shown { display: block; }
    MainScreen #told.-fault { color: $error; }
    MainScreen #status { height: 1; padding: 0 2; color: $text-muted; text-wrap: nowrap;
        text-overflow: ellipsis; }
    MainScreen #status.-fault { color: $error; }
    MainScreen Gauges { width: 38; display: none; }
    MainScreen SettingsPanel { display: none; }
    MainScreen.-gauges Gauges { display: block; }
    MainScreen.-settings SettingsPanel { display: block; }
    MainScreen.-settings Gauges { display: none; }
    MainScreen SessionList { display: none; }
    MainScreen.-sessions SessionList { display: block; }
    """
    server: reactive[str] = reactive("WAITING")

    def __init__(self, desk: Desk, where: str, names: Names) -> None:
        super().__init__()
        self._desk, self._where, self._names = desk, where, names
        self.opened: OpenSession | None = None
        # kept here, as what is drawn at a beat may go on for a moment when the screen is taken down
        self._list, self._transcript = SessionList(), Transcript()
        self._title_line = Static(id="title", markup=False)
        self._status_line = Static(id="status", markup=False)
        self._wants: dict[str, bool] = {}
        self._title = ("", "", 0)
        self._status = ""

    def compose(self) -> ComposeResult:
        yield self._title_line
        with Horizontal(id="body"):
            yield self._list
            with Vertical(id="centre"):
                yield self._transcript
                yield Static(id="told", markup=False)
                yield Suggestions()
                yield self._status_line
                yield Prompt(lambda text: completions(text, self._names))
            yield Gauges()
            yield SettingsPanel()
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(Prompt).focus()

    def on_resize(self, event: events.Resize) -> None:
        self._fold(event.size.width)

    @property
    def is_whole(self) -> bool:
        """Whether its widgets are there: not before it is shown, nor when the program ends."""
        return self.is_attached and bool(self.query(Prompt))

    async def show(self, opened: OpenSession) -> None:
        """Go to a session; what is typed stays with the one it was typed in."""
        prompt = self.query_one(Prompt)
        if self.opened is not None:
            self.opened.draft = prompt.whole
        if self.opened is not None or not prompt.text:  # what was typed before the first one stays
            prompt.put(opened.draft)
        self.opened = opened
        await self._transcript.show(opened)
        self.show_settings()
        await self.sync()

    async def sync(self) -> None:
        """What is new in the session and in the list."""
        if self.opened is None:
            return
        await self._transcript.sync()
        self._list.show(self._rows(), self.opened.id)
        self._show_title()
        self._show_status()

    def tell(self, message: str, *, fault: bool = False) -> None:
        """Some lines above the prompt, until the next prompt."""
        told = self.query_one("#told", Static)
        told.update(Content(message))
        told.set_class(bool(message), "-shown")
        told.set_class(fault, "-fault")

    def show_settings(self) -> None:
        """The settings in force in the panel."""
        if self.opened is None or not self.has_class("-settings"):
            return
        session = self.opened.session
        rows = commands.parameter_rows(session)
        ctx = str(session.options.ctx or "")
        system = session.conversation.system or ""
        self.query_one(SettingsPanel).show(system, ctx, rows)

    def toggle_settings(self) -> None:
        """Open the panel of settings, or close it."""
        is_open = not self.has_class("-settings")
        self.set_class(is_open, "-settings")
        self._fold(self.size.width)
        self.show_settings()
        if is_open:
            self.query_one("#set-temperature Input").focus()
        else:
            self.query_one(Prompt).focus()

    def watch_server(self) -> None:
        """Said in the first line."""
        if self.is_whole:
            self._show_title()

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        prompt = event.text_area
        if not isinstance(prompt, Prompt):
            return
        if self.opened is not None:
            self.opened.draft = prompt.whole
        self.query_one(Suggestions).offer(suggestions(prompt.text, self._names)[:50])

    def on_option_list_option_selected(self, event: Suggestions.OptionSelected) -> None:
        if isinstance(event.option_list, Suggestions) and event.option.id is not None:
            prompt = self.query_one(Prompt)
            prompt.put(event.option.id + " ")
            prompt.focus()

    def on_settings_panel_closed(self) -> None:
        self.toggle_settings()

    def action_toggle_sessions(self) -> None:
        self._toggle("-sessions")

    def action_toggle_gauges(self) -> None:
        self._toggle("-gauges")

    def action_thought(self) -> None:
        self._transcript.toggle_thought()

    def action_scroll(self, by: int) -> None:
        transcript = self._transcript
        if by < 0:
            transcript.scroll_page_up(animate=False)
        else:
            transcript.scroll_page_down(animate=False)

    async def action_earlier(self) -> None:
        transcript = self._transcript
        if not await transcript.show_earlier():
            transcript.scroll_home(animate=False)

    def action_latest(self) -> None:
        self._transcript.anchor()

    def action_list(self) -> None:
        if not self.has_class("-sessions"):
            self._toggle("-sessions")
        self._list.focus()

    def action_prompt(self) -> None:
        self.tell("")
        self.query_one(Prompt).focus()

    def _toggle(self, part: str) -> None:
        self._wants[part] = not self.has_class(part)
        self._fold(self.size.width)

    def _fold(self, width: int) -> None:
        """Show what there is room for, unless the user has said otherwise."""
        settings = self.has_class("-settings")
        room = {
            "-sessions": width >= (_GAUGES_COLUMNS if settings else _LIST_COLUMNS),
            "-gauges": width >= _GAUGES_COLUMNS,
        }
        for part, fits in room.items():
            self.set_class(self._wants.get(part, fits), part)
        self._list.styles.width = 28 if width >= 100 else 22
        # room for the transcript first: the rest covers what it has to
        self.query_one(SettingsPanel).styles.width = min(44, max(30, width - 34))

    def _rows(self) -> list[Row]:
        rows = []
        for listed in self._desk.listed:
            opened = self._desk.open.get(listed.id)
            turns, state = listed.turns, ""
            if opened is not None and opened.answering is not None:
                state = opened.answering.progress()
            elif listed.is_growing:
                state = "writing elsewhere"
            name = opened.name if opened is not None else listed.name
            model = opened.session.asked if opened is not None else listed.model
            rows.append(Row(listed.id, name, model or "tiny", turns, state))
        return rows

    def _show_title(self) -> None:
        if self.opened is None:
            return
        session = self.opened.session
        model = report.model_line(session.info) if session.info else session.name
        title = (f"{self.opened.name}  {one_line(model)}", self.server, self.size.width)
        if title == self._title:
            return
        self._title = title
        left = Content.assemble(
            ("localgen tui", "bold $primary"),
            (f"  {one_line(self.opened.name)}", "bold"),
            (f"  {one_line(model)}", "dim"),
        )
        # at the right it must not be pushed out by a long name
        right = Content.styled(f"● {self.server} {self._where}", _STYLES[self.server])
        room = max(20, self.size.width - 2 - right.cell_length - 1)
        line = spread(left.truncate(room, ellipsis=True), right, self.size.width - 2)
        self._title_line.update(line)

    def _show_status(self) -> None:
        assert self.opened is not None
        status, fault = status_of(self.opened)
        if status == self._status:
            return
        self._status = status
        line = self._status_line
        line.update(Content(status))
        line.set_class(fault, "-fault")


def status_of(opened: OpenSession) -> tuple[str, bool]:
    """What the session does, in a line; whether it is a fault."""
    if opened.unkept:
        return f"not saved: {one_line(opened.unkept)}", True
    if opened.answering is not None:
        return one_line(opened.answering.line()), False
    if opened.busy:
        return one_line(opened.busy), False
    if opened.kept.growing is not None:
        return "another localgen tui writes an answer here", False
    last = opened.last
    if last is not None and last.error and not last.is_stopping:
        return f"{one_line(last.error)} · Ctrl+R asks again", True
    used, limit = opened.session.used_tokens(), opened.session.ctx
    exact = opened.session.last is not None
    context = f"context {'' if exact else '~'}{used:,}" + (f"/{limit:,}" if limit else "")
    return context, False
