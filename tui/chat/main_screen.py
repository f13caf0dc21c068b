"""The main screen: sessions, transcript and prompt; gauges or settings at the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import Static, TextArea

from localgen.backends import units
from localgen.backends.terminal_text import escape_name, one_line
from localgen.chat import report
from localgen.chat.settings import effective_parameter_rows
from localgen.client.suggested_models import SuggestedModel
from localgen.config import BUILT_IN_MODEL
from localgen.hub.packaged import default_model
from localgen.mcp_tools.call_question import CallQuestion
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.server_status import ServerStatus
from localgen.tui.chat.session_list import SessionList, SessionRow
from localgen.tui.chat.session_manager import SessionManager
from localgen.tui.chat.settings import SettingsPanel
from localgen.tui.chat.slash_commands import CompletionSources, command_completions
from localgen.tui.chat.start_view import STARTERS, StartView
from localgen.tui.chat.suggestions import Suggestions
from localgen.tui.chat.tool_question import ToolQuestion
from localgen.tui.chat.transcript import TRANSCRIPT_BINDINGS, Transcript
from localgen.tui.gauges.panel import GaugePanel
from localgen.tui.key_file import with_names
from localgen.tui.widgets.alignment import align_ends
from localgen.tui.widgets.dialog import ScrollableTextDialog
from localgen.tui.widgets.footer import KeyFooter
from localgen.tui.widgets.notice import Notice

_SESSIONS_MIN_COLUMNS, _GAUGES_MIN_COLUMNS = 76, 118
_MAX_MESSAGE_LINES = 12
_STATUS_STYLES = {"LIVE": "$success", "LOST": "$error", "WAITING": "dim", "NO FIGURES": "$warning"}


class QuantizeStatusLine(Static):
    """Status of the background quantization; a click opens its screen."""

    DEFAULT_CSS = """
    QuantizeStatusLine { height: 1; padding: 0 2; color: $accent; text-wrap: nowrap;
        text-overflow: ellipsis; display: none; }
    """

    def show_status(self, line: str) -> None:
        self.display = bool(line)
        if str(self.content) != line:
            self.update(Content(line))

    async def on_click(self) -> None:
        await self.run_action("app.quantize")


class MainScreen(Screen[None]):
    """Shows `current_session`. sync() is called many times a second while answers grow.

    server_status: connection to the server. #message: the last message, above the prompt.
    """

    # each gauge needs a few lines
    VERTICAL_BREAKPOINTS = [(0, "-short"), (22, "-mid"), (27, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = with_names(
        Binding("f7", "toggle_sessions", "Show or hide sessions", show=False),
        Binding("f6", "toggle_gauges", "Show or hide gauges", show=False),
        *TRANSCRIPT_BINDINGS,
        Binding("ctrl+l", "focus_sessions", "To the list of sessions", show=False),
        Binding("escape", "focus_prompt", "Back to the prompt", show=False),
    )
    DEFAULT_CSS = """
    MainScreen #title { height: 1; background: $panel; padding: 0 1; text-wrap: nowrap; }
    MainScreen #body { height: 1fr; }
    MainScreen #centre { width: 1fr; height: 1fr; }
    MainScreen #message { height: auto; padding: 0 2; color: $text-muted; display: none; }
    MainScreen #message.-shown { display: block; }
    MainScreen #message.-error { color: $error; }
    MainScreen #status { height: 1; padding: 0 2; color: $text-muted; text-wrap: nowrap;
        text-overflow: ellipsis; }
    MainScreen #status.-error { color: $error; }
    MainScreen GaugePanel { width: 38; display: none; }
    MainScreen.-stale GaugePanel { opacity: 60%; }
    MainScreen SettingsPanel { display: none; }
    MainScreen.-gauges GaugePanel { display: block; }
    MainScreen.-settings SettingsPanel { display: block; }
    MainScreen.-settings GaugePanel { display: none; }
    MainScreen SessionList { display: none; }
    MainScreen StartView { display: none; }
    MainScreen.-start StartView { display: block; }
    MainScreen.-start Transcript { display: none; }
    MainScreen.-sessions SessionList { display: block; }
    """
    server_status: reactive[ServerStatus] = reactive(ServerStatus())

    def __init__(
        self, manager: SessionManager, server_label: str, completion_sources: CompletionSources
    ) -> None:
        super().__init__()
        self._manager, self._server_label, self._completion_sources = (
            manager,
            server_label,
            completion_sources,
        )
        self.current_session: ActiveSession | None = None
        # attributes, not queries: a tick may still draw while the screen is being removed
        self._session_list, self._transcript = SessionList(), Transcript()
        self._start_view, self._suggestions = StartView(), Suggestions(completion_sources)
        self._title_line = Static(id="title", markup=False)
        self._status_line = Static(id="status", markup=False)
        self._quantize_status_line = QuantizeStatusLine(markup=False)
        self._tool_question = ToolQuestion()
        self._is_switching = self._has_deferred_submit = False
        self._visibility_overrides: dict[str, bool] = {}
        self._shown_title = ("", "", 0)
        self._shown_status = ""
        self._can_stop = False
        self.running_shell_line = ""

    def compose(self) -> ComposeResult:
        self.add_class("-start")
        self._update_layout_classes(self.app.size.width)  # changed later, they style all again
        yield self._title_line
        yield Notice()
        with Horizontal(id="body"):
            yield self._session_list
            with Vertical(id="centre"):
                yield self._start_view
                yield self._transcript
                yield Static(id="message", markup=False)
                yield self._suggestions
                yield self._tool_question
                yield self._quantize_status_line
                yield self._status_line
                yield Prompt(
                    lambda text: command_completions(text, self._completion_sources),
                    self._suggestions.files,
                    self._suggestions.move,
                    self._drops_key,
                )
            yield GaugePanel()
        yield KeyFooter(compact=True, has_effect=self._has_effect)

    def on_mount(self) -> None:
        prompt = self.query_one(Prompt)
        prompt.starters = STARTERS
        prompt.focus()
        self._show_server()  # the status may already be known
        self.show_message(self._manager.context.notice, is_error=True)

    def on_resize(self, event: events.Resize) -> None:
        self._update_layout_classes(event.size.width)

    @property
    def is_composed(self) -> bool:
        """True once the widgets are composed, until the app exits."""
        return self.is_attached and bool(self.query(Prompt))

    @property
    def is_shown(self) -> bool:
        """True if no screen is on top. Textual's is_current is also True below a modal one."""
        return self.app.screen is self

    def begin_switch(self) -> None:
        """Start a switch: text typed from now on belongs to the session shown next."""
        if self.current_session is not None and not self._is_switching:
            prompt = self.query_one(Prompt)
            self.current_session.unsent_prompt = prompt.full_text
            self._is_switching = True
            prompt.set_text("")

    def cancel_switch(self) -> None:
        """Return to the current session, since the other one could not be opened."""
        if self.current_session is not None and self._is_switching:
            self.show_session(self.current_session)

    def show_session(self, active: ActiveSession) -> None:
        """Switch to a session; unsent prompts stay with their sessions."""
        if self.has_class("-settings"):
            self.query_one(SettingsPanel).submit_edits()
        self.begin_switch()
        prompt = self.query_one(Prompt)
        typed = prompt.full_text
        self.current_session, self._is_switching = active, False
        if active.unsent_prompt:  # else the prompt already has the text
            prompt.set_text(active.unsent_prompt + typed)
        self.refresh_bindings()  # some keys need a session
        self._transcript.show_session(active)
        self.show_settings()
        self.sync()
        if self._has_deferred_submit:
            self._has_deferred_submit = False
            prompt.action_send()
            prompt.release_keys()

    def show_suggested(self, models: Sequence[SuggestedModel]) -> None:
        """Show models that fit, on the start view."""
        self._start_view.show_suggested(models, default_model())

    def action_submit(self, text: str) -> None:
        """Submit a prompt or a command, as if it had been typed."""
        prompt = self.query_one(Prompt)
        if prompt.text and prompt.text not in prompt.starters:
            self.show_message("send or clear what is in the prompt first")
            return
        prompt.set_text(text)
        prompt.action_send()

    def put_before(self, active: ActiveSession, text: str, *, after: str = "") -> str:
        """Put text before what is in the prompt: a refused prompt of that session, for example.

        after: text at the beginning of the prompt that stays there, if it still is. Returns what
        is before the user's own text now.
        """
        typed = self.typed_text(active)
        start = after if typed.startswith(after) else ""
        typed = typed.removeprefix(start)
        active.unsent_prompt = start + f"{text}\n{typed}".removesuffix("\n")
        if self._has_prompt(active):
            self.query_one(Prompt).set_text(active.unsent_prompt)
        return start + text

    def typed_text(self, active: ActiveSession) -> str:
        """The text of a session's prompt that is not sent."""
        if self._has_prompt(active):
            return self.query_one(Prompt).full_text
        return active.unsent_prompt

    def _has_prompt(self, active: ActiveSession) -> bool:
        return active is self.current_session and not self._is_switching

    def defer_submit(self) -> bool:
        """Return True if a submitted prompt must wait until the session switch is complete."""
        self._has_deferred_submit = self.current_session is None or self._is_switching
        return self._has_deferred_submit

    def sync(self) -> None:
        """Show changes of the session and the session list."""
        if self.current_session is None:
            return
        self._transcript.sync()
        self._show_start(self.current_session)
        self._session_list.show_sessions(self._session_rows(), self.current_session.id)
        self._show_title()
        self._show_status()
        self._tool_question.show_question(self.current_session.question)
        can_stop = self.current_session.can_stop or bool(self.running_shell_line)
        if self._can_stop != can_stop:
            self._can_stop = can_stop
            self.refresh_bindings()

    @property
    def shown_question(self) -> CallQuestion | None:
        """The question about a tool call that the user sees."""
        return self._tool_question.question

    def accepts_answer(self, given_s: float) -> bool:
        """Whether an answer of that time is for the question that is shown; if not, says so."""
        is_accepted = self._tool_question.accepts(given_s)
        if not is_accepted:
            self.show_message("the question has just appeared: read it and answer again")
        return is_accepted

    def on_key(self, event: events.Key) -> None:
        if self._drops_key(event):
            event.prevent_default().stop()

    def _drops_key(self, event: events.Key) -> bool:
        """True for an answer that was typed before the question: keys may wait in queues."""
        if self.shown_question is None or not self.is_shown:
            return False
        found = self.active_bindings.get(event.key)
        is_answer = found is not None and found.binding.action.startswith("answer_call(")
        return is_answer and not self.accepts_answer(event.time)

    def set_running_shell_line(self, line: str) -> None:
        """The line of the shell that is running; empty if none is."""
        self.running_shell_line = line
        self.sync()

    def _has_effect(self, action: str) -> bool:
        """True if the key of an action has an effect now; that of Stop makes room for Quit."""
        return action != ("quit" if self._can_stop else "stop")

    def show_message(self, message: str, *, is_error: bool = False, title: str = "") -> None:
        """Show a message above the prompt until the next; a long one in a dialog of that title."""
        text = Content(message)
        width = self.query_one("#centre").size.width - 4
        most = min(_MAX_MESSAGE_LINES, self.size.height // 3)
        if width > 0 and text.get_height({}, width) > most:
            self.app.push_screen(ScrollableTextDialog(title or self.app.title, text))
            message, text = "", Content("")
        line = self.query_one("#message", Static)
        line.update(text)
        line.set_class(bool(message), "-shown")
        line.set_class(is_error, "-error")

    def show_quantize_status(self, line: str) -> None:
        """Show the status of the background quantization; empty hides the line."""
        self._quantize_status_line.show_status(one_line(line))

    def show_settings(self) -> None:
        """Update the settings panel if it is open."""
        if self.current_session is None or not self.has_class("-settings"):
            return
        session = self.current_session.chat
        rows = effective_parameter_rows(session)
        ctx = None if session.is_remote else str(session.options.ctx or "")
        system = session.conversation.system or ""
        self.query_one(SettingsPanel).show_settings(self.current_session.id, system, ctx, rows)

    async def toggle_settings(self) -> None:
        """Open or close the settings panel."""
        if not self.query(SettingsPanel):
            # not before: it has more widgets than the rest of the screen, and each is styled anew
            # with the screen
            await self.query_one("#body").mount(SettingsPanel())
        is_open = not self.has_class("-settings")
        self.set_class(is_open, "-settings")
        self._update_layout_classes(self.size.width)
        self.show_settings()
        if is_open:
            self.query_one("#set-temperature Input").focus()
        else:
            self.query_one(Prompt).focus()

    def watch_server_status(self) -> None:
        """Show status and notice; figures of a lost server are dimmed."""
        if self.is_composed:
            self._show_title()
            self._show_server()

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        prompt = event.text_area
        if not isinstance(prompt, Prompt):
            return
        if self.current_session is not None and not self._is_switching:
            self.current_session.unsent_prompt = prompt.full_text
        self._suggestions.show_for(prompt.text, prompt.text_before_cursor)

    def on_suggestions_chosen(self, event: Suggestions.Chosen) -> None:
        prompt = self.query_one(Prompt)
        if event.is_file:
            prompt.insert_file(event.text)
        else:
            prompt.set_text(event.text + " ")
        prompt.focus()

    async def on_settings_panel_closed(self) -> None:
        await self.toggle_settings()

    def action_toggle_sessions(self) -> None:
        self._toggle("-sessions")

    def action_toggle_gauges(self) -> None:
        self._toggle("-gauges")

    def action_toggle_reasoning(self) -> None:
        self._transcript.toggle_reasoning()

    def action_scroll(self, by: int) -> None:
        self._transcript.scroll_pages(by)

    def action_show_earlier(self) -> None:
        self._transcript.scroll_to_start()

    def action_show_latest(self) -> None:
        self._transcript.show_latest()

    def action_focus_sessions(self) -> None:
        if not self.has_class("-sessions"):
            self._toggle("-sessions")
        self._session_list.focus()

    def action_focus_prompt(self) -> None:
        self.show_message("")
        self.query_one(Prompt).focus()

    def _toggle(self, part: str) -> None:
        self._visibility_overrides[part] = not self.has_class(part)
        self._update_layout_classes(self.size.width)

    def _update_layout_classes(self, width: int) -> None:
        """Show the panels that fit, unless the user has toggled them."""
        has_gauges = width >= _GAUGES_MIN_COLUMNS and not self.has_class("-start")
        gauges = self._visibility_overrides.get("-gauges", has_gauges)
        side = gauges or self.has_class("-settings")
        least = _GAUGES_MIN_COLUMNS if side else _SESSIONS_MIN_COLUMNS
        sessions = self._visibility_overrides.get("-sessions", width >= least)
        self.update_classes({"-gauges": gauges, "-sessions": sessions})
        self._session_list.styles.width = 28 if width >= 100 else 24
        # leave room for the transcript; the panel covers the rest
        self.query(SettingsPanel).set_styles(width=min(44, max(30, width - 34)))

    def _session_rows(self) -> list[SessionRow]:
        assert self.current_session is not None
        rows, open_now = [], self._manager.active_by_id
        now_s = self._manager.context.now_s()
        for listed in self._manager.summaries:
            opened = open_now.get(listed.id)
            state, rates = _activity(opened) if opened is not None else ("", ())
            if not state and listed.is_generating:
                state = "elsewhere"
            name = opened.name if opened is not None else listed.name
            age = _age_text(now_s - listed.changed_s) if listed.num_turns else ""
            rows.append(SessionRow(listed.id, name, age, state, rates, listed.depth))
        return rows

    def _show_start(self, active: ActiveSession) -> None:
        """Show the welcome as long as the session is empty; the gauges come with the first turn."""
        is_start = self._transcript.is_empty
        if is_start:
            lines = (_model_introduction(active), *report.tool_lines(active.chat.tools))
            self._start_view.show_model("\n".join(map(one_line, lines)))
        if is_start != self.has_class("-start"):
            self.set_class(is_start, "-start")
            self.query_one(Prompt).starters = STARTERS if is_start else ()
            self._update_layout_classes(self.size.width)

    def _show_title(self) -> None:
        if self.current_session is None:
            return
        session = self.current_session.chat
        info = session.model_info
        model = report.model_line(info) if info is not None else escape_name(session.name)
        status = self.server_status.label
        title = (f"{self.current_session.name}  {one_line(model)}", status, self.size.width)
        if title == self._shown_title:
            return
        self._shown_title = title
        left = Content.assemble(
            ("localgen tui", "bold $primary"),
            (f"  {escape_name(self.current_session.name)}", "bold"),
            (f"  {one_line(model)}", "dim"),
        )
        # the status at the right must not be pushed out by a long name
        right = Content.styled(f"● {status} {self._server_label}", _STATUS_STYLES[status])
        room = max(20, self.size.width - 2 - right.cell_length - 1)
        line = align_ends(left.truncate(room, ellipsis=True), right, self.size.width - 2)
        self._title_line.update(line, layout=False)

    def _show_server(self) -> None:
        self.query_one(Notice).show_message(self.server_status.notice)
        is_old = (
            not self.server_status.is_live
            and self.query_one(GaugePanel).sample.snapshot.server_type
        )
        self.set_class(bool(is_old), "-stale")

    def _show_status(self) -> None:
        assert self.current_session is not None
        status, fault = session_status(self.current_session)
        if self.running_shell_line:
            status = f"{one_line(self.running_shell_line)} is running · {status}"
        if status == self._shown_status:
            return
        self._shown_status = status
        line = self._status_line
        line.update(Content(status), layout=False)
        line.set_class(fault, "-error")


def _model_introduction(active: ActiveSession) -> str:
    """Which model answers, in a sentence."""
    session = active.chat
    name = one_line(session.name)
    if session.is_remote:
        return f"{name} answers, at {one_line(session.client.url)}."
    if name == BUILT_IN_MODEL:
        return f"{name} answers: a demo of 6M parameters. Ctrl+O gets a real model."
    return f"{name} answers, on this machine."


def _activity(active: ActiveSession) -> tuple[str, tuple[float, ...]]:
    """Activity of an open session in a few words, and its speed lately in tokens/s."""
    answering = active.answer_stream  # read once: another thread may reset it
    if answering is not None:
        return answering.short_progress_text(), answering.rates.values()
    return ("not saved" if active.save_error else ""), ()


def _age_text(seconds: float) -> str:
    """A time that has passed in its largest unit: 3m, 2h, 5d; empty below a minute."""
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f}{unit}"
    return ""


def session_status(active: ActiveSession) -> tuple[str, bool]:
    """Status line of a session, and whether it is an error."""
    line, is_error = _status(active)
    queued = len(active.queued_prompts)
    return (f"{units.format_count(queued, 'prompt')} queued · {line}" if queued else line), is_error


def _status(active: ActiveSession) -> tuple[str, bool]:
    answering, busy, share = active.answer_stream, active.running_command, active.load_progress
    if active.save_error:
        return f"not saved: {one_line(active.save_error)}", True
    if answering is not None or busy:
        line = busy if answering is None else answering.status_line()
        parts = (
            active.client_message if answering is None or not answering.num_tokens else "",
            line,
            "" if answering is not None or share is None else report.loading_text(share),
        )
        return one_line(" · ".join(part for part in parts if part)), False
    if active.record.unfinished_turn is not None:
        return "another localgen tui is answering here", False
    last = active.last_stream
    if last is not None and last.error and not last.is_stopping:
        # advice first, so that it is not cut off
        return f"Ctrl+R asks again · {one_line(last.error)}", True
    used, limit = active.chat.estimate_used_tokens(), active.chat.ctx
    about = "~" if active.chat.used_tokens is None else ""
    context = f"context {about}{used:,}" + (f"/{limit:,}" if limit else "")
    return context, False
