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
from textual.widgets import Static, TextArea

from localgen.backends.terminal_text import one_line
from localgen.chat import commands, report
from localgen.chat.session import BUILT_IN
from localgen.tui.chat.active_session import OpenSession
from localgen.tui.chat.prompt import Prompt, Suggestions
from localgen.tui.chat.server_status import ServerState
from localgen.tui.chat.session_list import Row, SessionList
from localgen.tui.chat.session_manager import Desk
from localgen.tui.chat.settings import SettingsPanel
from localgen.tui.chat.slash_commands import Names, completions, suggestions
from localgen.tui.chat.transcript import READING, Transcript
from localgen.tui.gauges.panel import Gauges
from localgen.tui.gauges.plots import spread
from localgen.tui.widgets.dialog import Sheet
from localgen.tui.widgets.footer import Keys
from localgen.tui.widgets.notice import Notice

_LIST_COLUMNS, _GAUGES_COLUMNS = 76, 118
_MOST_TOLD = 12
_STYLES = {"LIVE": "$success", "LOST": "$error", "WAITING": "dim", "NO FIGURES": "$warning"}


class WorkLine(Static):
    """What goes on behind the chats; a click shows it."""

    DEFAULT_CSS = """
    WorkLine { height: 1; padding: 0 2; color: $accent; text-wrap: nowrap; text-overflow: ellipsis;
        display: none; }
    """

    def show(self, line: str) -> None:
        self.display = bool(line)
        if str(self.content) != line:
            self.update(Content(line))

    async def on_click(self) -> None:
        await self.run_action("app.quantize")


class MainScreen(Screen[None]):
    """Shows the session `opened`. sync() is called many times a second while answers grow.

    server: how it stands with it; told: what was last said to the user, above the prompt.
    """

    # gauges need some lines each
    VERTICAL_BREAKPOINTS = [(0, "-short"), (22, "-mid"), (27, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f7", "toggle_sessions", "Sessions: show or fold", show=False),
        Binding("f6", "toggle_gauges", "Gauges: show or fold", show=False),
        *READING,
        Binding("ctrl+l", "list", "To the list of sessions", show=False),
        Binding("escape", "prompt", "Back to the prompt", show=False),
    ]
    DEFAULT_CSS = """
    MainScreen #title { height: 1; background: $panel; padding: 0 1; text-wrap: nowrap; }
    MainScreen #body { height: 1fr; }
    MainScreen #centre { width: 1fr; height: 1fr; }
    MainScreen #told { height: auto; padding: 0 2; color: $text-muted; display: none; }
    MainScreen #told.-shown { display: block; }
    MainScreen #told.-fault { color: $error; }
    MainScreen #status { height: 1; padding: 0 2; color: $text-muted; text-wrap: nowrap;
        text-overflow: ellipsis; }
    MainScreen #status.-fault { color: $error; }
    MainScreen Gauges { width: 38; display: none; }
    MainScreen.-stale Gauges { opacity: 60%; }
    MainScreen SettingsPanel { display: none; }
    MainScreen.-gauges Gauges { display: block; }
    MainScreen.-settings SettingsPanel { display: block; }
    MainScreen.-settings Gauges { display: none; }
    MainScreen SessionList { display: none; }
    MainScreen.-sessions SessionList { display: block; }
    """
    server: reactive[ServerState] = reactive(ServerState())

    def __init__(self, desk: Desk, where: str, names: Names) -> None:
        super().__init__()
        self._desk, self._where, self._names = desk, where, names
        self.opened: OpenSession | None = None
        # kept here, as what is drawn at a beat may go on for a moment when the screen is taken down
        self._list, self._transcript = SessionList(), Transcript()
        self._title_line = Static(id="title", markup=False)
        self._status_line = Static(id="status", markup=False)
        self._work_line = WorkLine(markup=False)
        self._is_between = self._is_early = False
        self._wants: dict[str, bool] = {}
        self._title = ("", "", 0)
        self._status = ""

    def compose(self) -> ComposeResult:
        yield self._title_line
        yield Notice()
        with Horizontal(id="body"):
            yield self._list
            with Vertical(id="centre"):
                yield self._transcript
                yield Static(id="told", markup=False)
                yield Suggestions()
                yield self._work_line
                yield self._status_line
                yield Prompt(lambda text: completions(text, self._names))
            yield Gauges()
            yield SettingsPanel()
        yield Keys(compact=True)

    def on_mount(self) -> None:
        self.query_one(Prompt).focus()
        self._show_server()  # it may have been known before

    def on_resize(self, event: events.Resize) -> None:
        self._fold(event.size.width)

    @property
    def is_whole(self) -> bool:
        """Whether its widgets are there: not before it is shown, nor when the program ends."""
        return self.is_attached and bool(self.query(Prompt))

    @property
    def is_shown(self) -> bool:
        """Whether it can be seen: Textual says is_current of what lies below any screen too."""
        top = self.app.screen
        return self.is_current and (top is self or top.styles.background.a < 1)

    def turn_away(self) -> None:
        """From now on what is typed is meant for the session that is shown next."""
        if self.opened is not None and not self._is_between:
            prompt = self.query_one(Prompt)
            self.opened.draft = prompt.whole
            self._is_between = True
            prompt.put("")

    async def turn_back(self) -> None:
        """There is none to be shown."""
        if self.opened is not None and self._is_between:
            await self.show(self.opened)

    async def show(self, opened: OpenSession) -> None:
        """Go to a session; what is typed stays with the one it was typed in."""
        if self.has_class("-settings"):
            self.query_one(SettingsPanel).leave()
        self.turn_away()
        prompt = self.query_one(Prompt)
        typed = prompt.whole
        self.opened, self._is_between = opened, False
        if opened.draft:  # else what was typed meanwhile is there already
            prompt.put(opened.draft + typed)
        self.refresh_bindings()  # some keys need a session
        await self._transcript.show(opened)
        self.show_settings()
        await self.sync()
        if self._is_early:
            self._is_early = False
            prompt.action_send()

    def holds_back(self) -> bool:
        """Whether what was sent waits for the session that is shown next."""
        self._is_early = self.opened is None or self._is_between
        return self._is_early

    async def sync(self) -> None:
        """What is new in the session and in the list."""
        if self.opened is None:
            return
        await self._transcript.sync()
        self._list.show(self._rows(), self.opened.id)
        self._show_title()
        self._show_status()

    def tell(self, message: str, *, fault: bool = False, title: str = "") -> None:
        """Some lines above the prompt, until the next prompt; what is longer gets a sheet.

        title: of the sheet.
        """
        text = Content(message)
        width = self.query_one("#centre").size.width - 4
        most = min(_MOST_TOLD, self.size.height // 3)
        if width > 0 and text.get_height({}, width) > most:
            self.app.push_screen(Sheet(title or self.app.title, text))
            message, text = "", Content("")
        told = self.query_one("#told", Static)
        told.update(text)
        told.set_class(bool(message), "-shown")
        told.set_class(fault, "-fault")

    def show_work(self, line: str) -> None:
        """What goes on behind the chats; empty: nothing."""
        self._work_line.show(one_line(line))

    def show_settings(self) -> None:
        """The settings in force in the panel."""
        if self.opened is None or not self.has_class("-settings"):
            return
        session = self.opened.session
        rows = commands.parameter_rows(session)
        ctx = None if session.is_elsewhere else str(session.options.ctx or "")
        system = session.conversation.system or ""
        self.query_one(SettingsPanel).show(self.opened.id, system, ctx, rows)

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
        """Said in the first line, and what is wrong below; old figures are dimmed."""
        if self.is_whole:
            self._show_title()
            self._show_server()

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        prompt = event.text_area
        if not isinstance(prompt, Prompt):
            return
        if self.opened is not None and not self._is_between:
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
        self._transcript.page(by)

    async def action_earlier(self) -> None:
        await self._transcript.to_beginning()

    async def action_latest(self) -> None:
        await self._transcript.show_latest()

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
        gauges = self._wants.get("-gauges", width >= _GAUGES_COLUMNS)
        side = gauges or self.has_class("-settings")
        least = _GAUGES_COLUMNS if side else _LIST_COLUMNS
        self.set_class(gauges, "-gauges")
        self.set_class(self._wants.get("-sessions", width >= least), "-sessions")
        self._list.styles.width = 28 if width >= 100 else 24
        # room for the transcript first: the rest covers what it has to
        self.query_one(SettingsPanel).styles.width = min(44, max(30, width - 34))

    def _rows(self) -> list[Row]:
        assert self.opened is not None
        rows, open_now = [], self._desk.open
        default = "the server's" if self.opened.session.is_elsewhere else BUILT_IN
        for listed in self._desk.listed:
            opened = open_now.get(listed.id)
            state = _state_of(opened) if opened is not None else ""
            if not state and listed.is_growing:
                state = "writing elsewhere"
            name = opened.name if opened is not None else listed.name
            model = opened.session.asked if opened is not None else listed.model
            rows.append(Row(listed.id, name, model or default, listed.turns, state))
        return rows

    def _show_title(self) -> None:
        if self.opened is None:
            return
        session = self.opened.session
        model = report.model_line(session.info) if session.info else session.name
        status = self.server.status
        title = (f"{self.opened.name}  {one_line(model)}", status, self.size.width)
        if title == self._title:
            return
        self._title = title
        left = Content.assemble(
            ("localgen tui", "bold $primary"),
            (f"  {one_line(self.opened.name)}", "bold"),
            (f"  {one_line(model)}", "dim"),
        )
        # at the right it must not be pushed out by a long name
        right = Content.styled(f"● {status} {self._where}", _STYLES[status])
        room = max(20, self.size.width - 2 - right.cell_length - 1)
        line = spread(left.truncate(room, ellipsis=True), right, self.size.width - 2)
        self._title_line.update(line)

    def _show_server(self) -> None:
        self.query_one(Notice).say(self.server.notice)
        is_old = not self.server.is_live and self.query_one(Gauges).reading.snapshot.kind
        self.set_class(bool(is_old), "-stale")

    def _show_status(self) -> None:
        assert self.opened is not None
        status, fault = status_of(self.opened)
        if status == self._status:
            return
        self._status = status
        line = self._status_line
        line.update(Content(status))
        line.set_class(fault, "-fault")


def _state_of(opened: OpenSession) -> str:
    """What an open session does, in few words."""
    answering = opened.answering  # another thread may settle it meanwhile
    if answering is not None:
        return answering.progress()
    return "not saved" if opened.unkept else ""


def status_of(opened: OpenSession) -> tuple[str, bool]:
    """What the session does, in a line; whether it is a fault."""
    answering, busy, share = opened.answering, opened.busy, opened.load_share
    if opened.unkept:
        return f"not saved: {one_line(opened.unkept)}", True
    if answering is not None or busy:
        line = busy if answering is None else answering.line()
        parts = (
            opened.news if answering is None or not answering.tokens else "",
            line,
            "" if answering is not None or share is None else f"loading {share:.0%}",
        )
        return one_line(" · ".join(part for part in parts if part)), False
    if opened.kept.growing is not None:
        return "another localgen tui writes an answer here", False
    last = opened.last
    if last is not None and last.error and not last.is_stopping:
        return f"Ctrl+R asks again · {one_line(last.error)}", True  # what to do is never cut off
    used, limit = opened.session.used_tokens(), opened.session.ctx
    exact = opened.session.last is not None
    context = f"context {'' if exact else '~'}{used:,}" + (f"/{limit:,}" if limit else "")
    return context, False
