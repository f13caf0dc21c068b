"""Comparison of models or settings: one prompt, answers and speeds side by side."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, HorizontalScroll, Vertical
from textual.content import Content
from textual.widgets import Button, Static, TextArea

from localgen.backends import units
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.terminal_text import escape_control_chars, escape_name, one_line
from localgen.chat import parameters, report
from localgen.chat.file_mentions import expand_mentions
from localgen.chat.session_store import SessionRecord
from localgen.client import Client
from localgen.hub.resolve import resolve_model
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.differences import DifferencesView, marked_answers
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.transcript import TRANSCRIPT_BINDINGS, Transcript
from localgen.tui.widgets.dialog import Dialog
from localgen.tui.widgets.footer import KeyFooter
from localgen.tui.widgets.text_field import TextField
from localgen.tui.widgets.tool_screen import ToolScreen

MAX_VARIANTS = 8
RequireModel = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CompareVariant:
    """One model with its parameters. model: its name. label: the line as typed."""

    model: str
    params: SamplingParams
    label: str


def parse_variants(
    text: str,
    params: SamplingParams,
    require_model: RequireModel = lambda name: None,
    *,
    is_remote: bool = False,
) -> list[CompareVariant]:
    """Parse one variant per line: a model, then NAME=VALUE settings applied to params.

    require_model: raises LocalgenError if a model is unknown. is_remote: the models are on a remote
    server. Raises InvalidRequest with the line number.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not 2 <= len(lines) <= MAX_VARIANTS:
        raise InvalidRequest(
            f"give 2 to {MAX_VARIANTS} lines, one model each; there are {len(lines)}"
        )
    found = []
    for number, line in lines:
        try:
            variant = _parse_variant(line, params, is_remote)
            require_model(variant.model)
            found.append(variant)
        except LocalgenError as error:
            raise InvalidRequest(f"line {number}: {error.message}") from error
    return found


def require_known_model(client: Client, name: str) -> None:
    """Raise ModelNotFound, with the known names, if the local server does not have a model."""
    # another server may have more models than it lists
    if not client.url and name not in {card.name for card in client.models()}:
        resolve_model(name)


def variant_records(record: SessionRecord, variants: list[CompareVariant]) -> list[SessionRecord]:
    """A session record per variant, each continuing the same conversation."""
    name = record.name or "Comparison"
    return [
        replace(
            record,
            name=f"{name} · {variant.label}",
            model=variant.model,
            params=variant.params,
            ctx=record.ctx if variant.model == record.model else None,
            unfinished_turn=None,
        )
        for variant in variants
    ]


def _parse_variant(line: str, params: SamplingParams, is_remote: bool) -> CompareVariant:
    try:
        model, *settings = shlex.split(line)
    except ValueError as error:
        raise InvalidRequest("close the quote") from error
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not value:
            raise InvalidRequest(f"{setting}: give NAME=VALUE, such as temperature=0")
        params = parameters.with_parameter(params, name, value, validate=not is_remote)
    return CompareVariant(model, params, " ".join([model, *settings]))


class CompareDialog(Dialog[list[CompareVariant] | None]):
    """Edits the list of variants. Closes with them, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Cancel"),
        Binding("ctrl+s", "compare", "Compare these", priority=True),
    ]
    DEFAULT_CSS = """
    CompareDialog > Vertical {
        width: 76; max-width: 95%; height: auto; max-height: 90%; padding: 0 1;
        border: round $primary; background: $surface; border-title-color: $primary;
        border-subtitle-color: $text-muted;
    }
    CompareDialog TextArea { height: 8; margin: 1 0; border: none; padding: 0; background: $panel; }
    CompareDialog #error { height: auto; color: $error; }
    CompareDialog Horizontal { height: auto; align-horizontal: right; }
    CompareDialog Button { margin-left: 2; }
    """

    def __init__(
        self,
        text: str,
        params: SamplingParams,
        require_model: RequireModel,
        *,
        is_remote: bool = False,
    ) -> None:
        super().__init__()
        self._text, self._params, self._is_remote = text, params, is_remote
        self._require_model = require_model

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Compare"
            box.border_subtitle = "Ctrl+S compares, Esc cancels"
            yield Static(
                "One line per variant: a model, then NAME=VALUE settings. Each becomes a session "
                "that continues this one.",
                markup=False,
            )
            yield TextField(self._text, compact=True, show_line_numbers=False)
            yield Static("", id="error", markup=False)
            with Horizontal():
                yield Button("Cancel", id="no", compact=True)
                yield Button("Compare", id="yes", variant="primary", compact=True)

    def on_mount(self) -> None:
        self.query_one(TextArea).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "yes":
            self.action_compare()
        else:
            self.dismiss(None)

    @work(exclusive=True)
    async def action_compare(self) -> None:
        text = self.query_one(TextArea).text
        parse = partial(
            parse_variants, text, self._params, self._require_model, is_remote=self._is_remote
        )
        try:
            # models are looked up on the disk, and a grammar is compiled in 0.3 s
            variants = await asyncio.to_thread(parse)
        except LocalgenError as error:
            self.query_one("#error", Static).update(Content(one_line(error.message)))
        else:
            if self.app.screen is self:  # else what is above it would be closed
                self.dismiss(variants)


_MIN_COLUMN_WIDTH = 26


class CompareColumn(Vertical):
    """The transcript and speed of one session."""

    DEFAULT_CSS = """
    CompareColumn {
        height: 1fr; border: round $border;
        border-title-color: $primary; border-title-style: bold;
    }
    CompareColumn:focus-within { border: round $primary; }
    CompareColumn > .speed { height: 1; padding: 0 1; color: $success; text-wrap: nowrap; }
    CompareColumn > .speed.-error { color: $error; }
    CompareColumn.-differences > Transcript { display: none; }
    CompareColumn.-differences > DifferencesView { display: block; }
    """

    def __init__(self, active: ActiveSession, label: str) -> None:
        super().__init__()
        self.active = active
        self.transcript, self._differences = Transcript(), DifferencesView()
        self._speed_line = Static("ready", classes="speed", markup=False)
        self.border_title = Content(escape_name(label))
        self._speed_text = ""

    def compose(self) -> ComposeResult:
        yield self.transcript
        yield self._differences
        yield self._speed_line

    def on_mount(self) -> None:
        self.transcript.show_session(self.active)

    @property
    def last_answer(self) -> str:
        turns = self.active.chat.conversation.turns
        return escape_control_chars(turns[-1].answer) if turns else ""

    def show_differences(self, answer: Content | None) -> None:
        """Show the last answer with its differing words lit; None: the transcript again."""
        self.set_class(answer is not None, "-differences")
        if answer is not None:
            self._differences.show_answer(answer)

    def sync(self) -> None:
        self.transcript.sync()
        text = self._current_speed_text()
        if text != self._speed_text:
            self._speed_text = text
            line = self._speed_line
            line.update(Content(text), layout=False)
            last = self.active.last_stream
            line.set_class(bool(last and last.error and not last.is_stopping), "-error")

    def _current_speed_text(self) -> str:
        last = self.active.last_stream
        if last is None:
            return "ready"
        if last.is_stopping:
            return "stopped"
        if last.error:
            return one_line(last.error)
        if (loaded := last.load_progress) is not None:
            return report.loading_text(loaded)
        mark = "▸ " if self.active.is_answering else ""
        tokens = last.completion.completion_tokens if last.completion else last.num_tokens
        parts = (last.speed_text(), units.format_count(tokens, "token"), self._memory_text())
        return mark + " · ".join(part for part in parts if part)

    def _memory_text(self) -> str:
        """Memory that the model was loaded with; empty if the server does not report it."""
        info = self.active.chat.model_info
        if info is None:
            return ""
        total = sum(part or 0 for part in (info.memory.weights, info.memory.kv, info.memory.work))
        return f"{units.format_size(total)} of memory" if total else ""


class CompareScreen(ToolScreen[None]):
    """Compares sessions in columns, with one prompt for all. Closing it keeps the sessions."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("ctrl+c", "stop", "Stop all", priority=True),
        Binding("ctrl+r", "regenerate", "Ask again"),
        Binding("ctrl+d", "differences", "Differences", priority=True),
        *TRANSCRIPT_BINDINGS,
    ]
    DEFAULT_CSS = """
    CompareScreen HorizontalScroll { height: 1fr; }
    """

    def __init__(
        self, labelled_sessions: list[tuple[ActiveSession, str]], show_message: Callable[..., None]
    ) -> None:
        super().__init__()
        self._labelled_sessions = labelled_sessions
        self._show_message = show_message

    def compose(self) -> ComposeResult:
        with HorizontalScroll(can_focus=False):
            for opened, label in self._labelled_sessions:
                yield CompareColumn(opened, label)
        yield Prompt(lambda text: [])
        yield KeyFooter(compact=True)

    def on_mount(self) -> None:
        self.query_one(Prompt).focus()

    def on_resize(self, event: events.Resize) -> None:
        """Give the columns equal widths; those that do not fit are reached by their focus."""
        num_columns = len(self._labelled_sessions)
        fitting = event.size.width // num_columns
        for column in self.query(CompareColumn):
            column.styles.width = max(fitting, _MIN_COLUMN_WIDTH)
        hint = "" if fitting >= _MIN_COLUMN_WIDTH else "; Shift+Tab goes to columns out of sight"
        self.query_one(Prompt).placeholder = f"Ask all {num_columns}{hint}"

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the prompt's keys for panels that this screen does not have."""
        return action not in ("toggle_gauges", "toggle_sessions")

    def on_screen_resume(self) -> None:
        self.refresh_bindings()  # the main screen's bindings are gone only now

    def sync(self) -> None:
        for column in self.query(CompareColumn):
            column.sync()

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        """Send a prompt to all sessions, unless one is still answering."""
        event.stop()
        prompt = self.query_one(Prompt)
        if any(opened.answer_stream is not None for opened, _ in self._labelled_sessions):
            self._show_message("an answer is being written: Ctrl+C stops all")
        else:
            prompt.mark_submitted(event.text)
            self._hide_differences()
            self._ask(event.text)
        prompt.release_keys()

    @work(group="ask")
    async def _ask(self, typed: str) -> None:
        try:
            prompt = await asyncio.to_thread(expand_mentions, typed)
        except InvalidRequest as error:
            self._show_message(error.message, is_error=True)
            return
        for notice in prompt.notices:
            self._show_message(notice)
        await self._for_each_session(lambda opened: opened.ask(prompt.text))

    @work(group="ask")
    async def action_regenerate(self) -> None:
        self._hide_differences()
        await self._for_each_session(lambda opened: opened.regenerate())

    def action_stop(self) -> None:
        stopped = [opened.stop() for opened, _ in self._labelled_sessions]
        if not any(stopped):
            self._show_message("nothing to stop; Esc goes back, Ctrl+Q quits")

    def action_differences(self) -> None:
        """Light up the words in which the last answers differ, or show the transcripts again."""
        columns = list(self.query(CompareColumn))
        if columns[0].has_class("-differences"):
            self._hide_differences()
        elif any(opened.answer_stream is not None for opened, _ in self._labelled_sessions):
            self._show_message("an answer is being written: the differences come after it")
        elif not all(column.last_answer for column in columns):
            self._show_message("ask something first: the answers are compared")
        else:
            self._mark_differences(columns)

    @work(group="differences", exclusive=True)
    async def _mark_differences(self, columns: list[CompareColumn]) -> None:
        answers = [column.last_answer for column in columns]
        marked = await asyncio.to_thread(marked_answers, answers)
        for column, answer in zip(columns, marked, strict=True):
            column.show_differences(answer)

    def _hide_differences(self) -> None:
        for column in self.query(CompareColumn):
            column.show_differences(None)

    def action_toggle_reasoning(self) -> None:
        for transcript in self.query(Transcript):
            transcript.toggle_reasoning()

    def action_scroll(self, by: int) -> None:
        """Scroll all columns together; a focused column scrolls alone with its own keys."""
        for transcript in self.query(Transcript):
            transcript.scroll_pages(by)

    def action_show_earlier(self) -> None:
        for transcript in self.query(Transcript):
            transcript.scroll_to_start()

    def action_show_latest(self) -> None:
        for transcript in self.query(Transcript):
            transcript.show_latest()

    def action_back(self) -> None:
        self.dismiss(None)

    async def _for_each_session(self, work: Callable[[ActiveSession], None]) -> None:
        for opened, _ in self._labelled_sessions:
            try:
                await asyncio.to_thread(work, opened)
            except LocalgenError as error:
                self._show_message(one_line(error.message), is_error=True)
