"""The `localgen tui` app: keys, widget messages, and the periodic updates."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from asyncio import Lock
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, ClassVar, Literal

from textual import work
from textual.app import SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import TextArea

from localgen.backends import units
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import escape_control_chars, escape_name, one_line
from localgen.chat import commands, saved_chats
from localgen.chat.report import verbose_stats_lines
from localgen.mcp_tools.call_question import Decision
from localgen.tui.base_app import BaseApp
from localgen.tui.chat import quit_confirmation, slash_commands
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.answer_copies import AnswerCopies
from localgen.tui.chat.editor import edit_in_editor
from localgen.tui.chat.main_screen import MainScreen
from localgen.tui.chat.markdown import RowRenderer
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.prompt_queue import PromptQueue
from localgen.tui.chat.server_status import live_server_status
from localgen.tui.chat.session_actions import SessionActions
from localgen.tui.chat.session_list import SessionList
from localgen.tui.chat.session_manager import SessionManager
from localgen.tui.chat.settings import SettingEdit, SettingsPanel
from localgen.tui.chat.shell_command import is_shell_line
from localgen.tui.chat.tool_question import TOOL_ANSWERS
from localgen.tui.chat.transcript import Transcript
from localgen.tui.feed import FIRST_RETRY_S, SampleFeed, SampleReceived, ServerLost, ServerMonitor
from localgen.tui.gauges.panel import GaugePanel
from localgen.tui.key_file import with_names
from localgen.tui.preferences import Preferences
from localgen.tui.widgets.dialog import ConfirmDialog
from localgen.tui.widgets.tool_screen import ToolScreen

if TYPE_CHECKING:
    from localgen.tui.quantize.runner import QuantizeRunner

TICK_S, SYNC_PERIOD_S = 1 / 12, 1.0
_TICKS_PER_IDLE_TICK = 6
_DOUBLE_PRESS_S = 2.0
# an answer that took longer is announced to a user who is in another window
_LONG_ANSWER_S = 10.0
_MAX_HISTORY = 500
_WARM_UP_MARKDOWN = "# a\n- **b** `c`\n\n|d|\n|-|\n|e|\n\n```python\nf = 1\n```\n"
_MAIN_SCREEN_ACTIONS = (
    *("new", "model", "settings", "search", "compare", "export", "editor"),
    *("step", "rename", "fork", "delete", "restore", "copy", "regenerate", "quantize"),
    *("answer_now", "answer_call", "tokens", "figures"),
)


class ChatApp(BaseApp):
    """The chat app.

    make_monitor: connects to the server for its statistics. server_label: the server's name.
    """

    TITLE = "localgen tui"
    HELP_NOTES = (
        "Enter sends; Ctrl+J, Alt+Enter or Shift+Enter starts a line.\n"
        "Up and Down go through earlier prompts; Tab completes commands and files.\n"
        "@FILE or @FILE:10-40 sends a file, or lines of it, with the prompt.\n"
        "!COMMAND runs in the shell; its output comes into the prompt.\n"
        "Ctrl+A and Ctrl+E go to the start and end of a line; Ctrl+W deletes a word,\n"
        "Ctrl+U and Ctrl+K the text before and after the cursor; Ctrl+Z undoes.\n"
        "In the list of sessions: r renames, f forks, d deletes.\n\n"
        + "\n".join(f"{name:<9} {usage}" for name, usage, _ in slash_commands.command_table())
    )
    # few have priority: such a key overtakes characters typed before it
    BINDINGS: ClassVar[list[BindingType]] = with_names(
        Binding("ctrl+n", "new", "New"),
        Binding("ctrl+o", "model", "Model"),
        Binding("ctrl+t", "settings", "Settings"),
        Binding("ctrl+f", "search", "Search"),
        Binding("ctrl+b", "compare", "Compare"),
        Binding("ctrl+c", "stop", "Stop", priority=True),
        Binding("ctrl+q", "quit", "Quit", priority=True),
        Binding("ctrl+r", "regenerate", "Regenerate", show=False),
        Binding("ctrl+x", "answer_now", "End the reasoning: answer now", show=False),
        Binding("ctrl+s", "export", "Export the transcript", show=False),
        Binding("ctrl+g", "editor", "Prompt in $EDITOR", show=False),
        Binding("ctrl+up", "step(-1)", "Previous session", show=False, id="previous_session"),
        Binding("ctrl+down", "step(1)", "Next session", show=False, id="next_session"),
        Binding("f3", "rename", "Rename the session", show=False),
        Binding("f4", "fork", "Fork the session", show=False),
        Binding("f8", "delete", "Delete the session", show=False),
        Binding("f9", "restore", "Restore what was deleted", show=False),
        Binding("ctrl+y", "copy", "Copy the last answer, then its code", show=False),
        Binding("f12", "retry", "Reconnect now", show=False),
        Binding("f10", "quantize", "Quantize a model", show=False),
        *(
            Binding(key.lower(), f"answer_call('{decision.value}')", text, show=False, id=name)
            for key, decision, text, name in TOOL_ANSWERS
        ),
        Binding("alt+i", "figures", "All figures of the last answer", show=False),
        Binding("f11,alt+t", "tokens", "Tokens of the answer and alternatives", show=False),
    )
    KEY_TABLE = "tui"
    KEY_OWNERS = (BINDINGS, MainScreen.BINDINGS, Prompt.BINDINGS)
    UNAVAILABLE_KEYS = Prompt.EDITING_KEYS

    def __init__(
        self,
        session_manager: SessionManager,
        make_monitor: Callable[[], ServerMonitor],
        server_label: str,
        preferences: Preferences | None = None,
        *,
        first_retry_s: float = FIRST_RETRY_S,
        quantize_runner: QuantizeRunner | None = None,
    ) -> None:
        super().__init__(preferences)
        self.session_manager = session_manager
        self._feed = SampleFeed(make_monitor, self.post_message, first_retry_s=first_retry_s)
        self._last_stop_s = float("-inf")
        self._num_ticks = 0
        self._answer_copies = AnswerCopies()
        self._is_quitting, self._is_in_focus = False, True
        self._finalize_lock, self._sync_lock = Lock(), Lock()
        self._settings_lock = Lock()
        names = slash_commands.CompletionSources(
            models=lambda: self.session_actions.model_names,
            saved_chats=lambda: saved_chats.saved_chat_names(session_manager.context.state_dir),
            sessions=lambda: [listed.name for listed in session_manager.summaries if listed.name],
        )
        self.main_screen = MainScreen(session_manager, server_label, names)
        self.quantize_runner = quantize_runner
        self.session_actions = SessionActions(self.main_screen, session_manager, self.show_message)
        self.prompt_queue = PromptQueue(self.main_screen, session_manager, self.session_actions)

    def get_default_screen(self) -> Screen[None]:
        return self.main_screen

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer session actions only on the main screen."""
        is_there = self.main_screen.is_shown and self.main_screen.current_session is not None
        return action not in _MAIN_SCREEN_ACTIONS or is_there

    def on_ready(self) -> None:
        """Start the timers and the server feed after the first paint."""
        gc.callbacks.append(self._freeze_survivors)
        self.set_interval(TICK_S, self._tick_unless_idle)
        self.set_interval(SYNC_PERIOD_S, self.sync_store)
        self._feed.start()
        self.sync_store()
        self._load_prompt_history()
        if not self.session_manager.context.server_url:
            self._load_suggestions()

    def warm_up(self) -> None:
        """Render Markdown once: the first answer would wait 70 ms for its imports."""
        RowRenderer(80, self.theme_variables).markdown(_WARM_UP_MARKDOWN)

    def on_unmount(self) -> None:
        self._feed.stop()
        with contextlib.suppress(ValueError):  # it ended before the first screen
            gc.callbacks.remove(self._freeze_survivors)
        gc.unfreeze()

    def on_app_focus(self) -> None:
        self._is_in_focus = True

    def on_app_blur(self) -> None:
        self._is_in_focus = False

    # The store may be locked for seconds. Whatever waits for it runs in a worker, since the app
    # would not process keys while it waits.

    @work(group="prompt_history")
    async def _load_prompt_history(self) -> None:
        with contextlib.suppress(LocalgenError):  # works without a history
            prompts = await asyncio.to_thread(
                self.session_manager.context.store.recent_prompts, _MAX_HISTORY
            )
            self.main_screen.query_one(Prompt).set_history(prompts)

    @work(group="suggestions")
    async def _load_suggestions(self) -> None:
        suggest = self.session_manager.context.suggest_models
        self.main_screen.show_suggested(await asyncio.to_thread(suggest))

    def _tick_unless_idle(self) -> None:
        """Tick; less often while no session does anything, as that takes CPU as well."""
        self._num_ticks += 1
        manager = self.session_manager
        is_busy = bool(manager.answering_sessions or manager.busy_sessions)
        if is_busy or self._num_ticks % _TICKS_PER_IDLE_TICK == 0:
            self.tick()

    def tick(self) -> None:
        """Update the current screen with new text and progress."""
        if self._is_quitting or not self.screen_stack:
            return
        current = self.main_screen.current_session
        news = [
            one_line(line if opened is current else f"{escape_name(opened.name)}: {line}")
            for opened, line in self.session_manager.drain_messages()
            if opened is not current or line != opened.client_message  # in the status line
        ]
        if news:
            self.show_message("\n".join(news))
        self.prompt_queue.ask_waiting()
        if any(not each.is_answering for each in self.session_manager.answering_sessions):
            self._finalize_answers()
        if isinstance(self.screen, ToolScreen):
            self.screen.sync()
        elif self.main_screen.is_shown:
            self.main_screen.sync()
        self._show_quantize_status()
        self._show_window_title()

    def _show_quantize_status(self) -> None:
        runner = self.quantize_runner
        if runner is None:
            return
        if self.main_screen.is_shown:
            run = runner.current_run if runner.is_running else None
            self.main_screen.show_quantize_status(
                "" if run is None else f"{run.status_line()} · F10"
            )
        from localgen.tui.quantize.screen import QuantizeScreen  # not at the start: 20 ms

        if not isinstance(self.screen, QuantizeScreen) and (news := runner.take_end_message()):
            self.show_message(news)

    @work(group="finalize")
    async def _finalize_answers(self) -> None:
        if not self._finalize_lock.locked():
            ended = [
                each for each in self.session_manager.answering_sessions if not each.is_answering
            ]
            async with self._finalize_lock:
                await self.session_actions.run_in_thread(self.session_manager.finalize_answers)
            self._announce(ended)
            if not self.session_manager.answering_sessions:
                gc.unfreeze()
                gc.collect()
                gc.freeze()

    def _freeze_survivors(self, phase: str, info: dict[str, int]) -> None:
        """While an answer is written, do not scan again what has survived a full collection: with
        a long one, each stopped the screen for 40 ms."""
        is_full = phase == "stop" and info["generation"] == 2
        if is_full and self.session_manager.answering_sessions:
            gc.freeze()

    def _announce(self, ended: list[ActiveSession]) -> None:
        """Tell a user who is in another window that long answers are done."""
        for opened in ended:
            last = opened.last_stream
            if last is not None and last.took_s() > _LONG_ANSWER_S and not self._is_in_focus:
                self.signals.notify(f"localgen: {escape_name(opened.name)}: the answer is there")

    def _show_window_title(self) -> None:
        opened = self.main_screen.current_session
        if opened is not None:
            writing = len(self.session_manager.answering_sessions)
            mark = "● " if writing else ""
            self.signals.set_title(f"{mark}localgen · {escape_name(opened.name)}")

    @work(group="sync")
    async def sync_store(self) -> None:
        """Save changes, and load those made by other processes."""
        if self._is_quitting or self._sync_lock.locked():
            return
        async with self._sync_lock:
            await self.session_actions.run_in_thread(self.session_manager.sync_store)
            opened = self.main_screen.current_session
            if opened is None or opened.id not in self.session_manager.active_by_id:
                await self.session_actions.show_session(self.session_manager.open_empty)

    def show_message(self, message: str, *, is_error: bool = False, title: str = "") -> None:
        """Show a message on the current screen. title: of the dialog for a long one."""
        if self.main_screen.is_shown:
            # the output of a command has several lines
            shown = one_line(message) if is_error else escape_control_chars(message)
            self.main_screen.show_message(shown, is_error=is_error, title=title)
        else:
            severe: Literal["error", "information"] = "error" if is_error else "information"
            self.notify(one_line(message), severity=severe, timeout=6, markup=False)

    # --- widget messages ---

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        if self.main_screen.defer_submit():
            return  # keys stay held until the session is there
        prompt = self.main_screen.query_one(Prompt)
        self.main_screen.show_message("")
        if commands.is_command(event.text):
            self._dispatch_command(event.text)
        elif is_shell_line(event.text):
            prompt.mark_submitted(event.text)
            self._run_in_worker(self.session_actions.run_shell(event.text))
        else:
            prompt.mark_submitted(event.text)
            self.prompt_queue.add(event.text)
        prompt.release_keys()

    def _dispatch_command(self, line: str) -> None:
        try:
            own = slash_commands.parse_screen_command(line)
        except InvalidRequest as error:
            self.show_message(error.message, is_error=True)
            self.main_screen.query_one(Prompt).select_refused(line)
            return
        self.main_screen.query_one(Prompt).mark_submitted(line)
        if own is None:
            self._run_in_worker(
                self.session_actions.run_command(self.session_actions.current_session, line)
            )
        else:
            self._run_in_worker(self.session_actions.run_screen_command(*own))

    def on_session_list_action_requested(self, event: SessionList.ActionRequested) -> None:
        match event.action:
            case "open":
                self._run_in_worker(self.session_actions.open(event.session_id))
                self.main_screen.query_one(Prompt).focus()
            case "rename":
                self._run_in_worker(self.session_actions.rename(event.session_id))
            case "fork":
                self._run_in_worker(self.session_actions.fork(event.session_id))
            case "delete":
                self._run_in_worker(self.session_actions.delete(event.session_id))

    def on_settings_panel_changed(self, event: SettingsPanel.Changed) -> None:
        self._apply_setting(event.edit)

    @work(group="set")
    async def _apply_setting(self, edit: SettingEdit) -> None:
        panel = self.main_screen.query_one(SettingsPanel)
        async with self._settings_lock:  # apply in the order of the edits
            opened = self.session_manager.active_by_id.get(edit.session_id)
            if opened is None:
                return
            try:
                await asyncio.to_thread(opened.apply_setting, edit.setting, edit.text)
            except LocalgenError as error:
                panel.mark_rejected(edit, one_line(error.message))
            else:
                panel.mark_applied(edit)
            self.main_screen.show_settings()

    def on_sample_received(self, message: SampleReceived) -> None:
        """Show a new sample."""
        if self.main_screen.server_status.label == "LOST":
            self.show_message("the server is back")
        is_remote = bool(self.session_manager.context.server_url)
        self.main_screen.server_status = live_server_status(
            message.sample.snapshot, is_remote=is_remote
        )
        if self.main_screen.is_composed:
            self.main_screen.query_one(GaugePanel).sample = message.sample

    def on_server_lost(self, message: ServerLost) -> None:
        """Show the status; the feed retries."""
        is_remote = bool(self.session_manager.context.server_url)
        self.main_screen.server_status = self.main_screen.server_status.after_loss(
            message, is_remote=is_remote
        )

    # --- keys ---

    def action_new(self) -> None:
        self._run_on_main_screen(self.session_actions.new)

    def action_model(self) -> None:
        self._run_on_main_screen(self.session_actions.pick_model)

    def action_quantize(self) -> None:
        if self.quantize_runner is None:
            from localgen.tui.quantize.runner import QuantizeRunner

            context = self.session_manager.context
            is_remote = bool(context.server_url)
            self.quantize_runner = QuantizeRunner(context.state_dir, is_remote=is_remote)
        runner = self.quantize_runner
        self._run_on_main_screen(lambda: self.session_actions.quantize(runner))

    def action_tokens(self) -> None:
        self._run_on_main_screen(self.session_actions.explore_tokens)

    def action_search(self) -> None:
        self._run_on_main_screen(self.session_actions.search)

    def action_compare(self) -> None:
        self._run_on_main_screen(self.session_actions.compare)

    def action_export(self) -> None:
        self._run_on_main_screen(self.session_actions.export)

    def action_restore(self) -> None:
        self._run_on_main_screen(self.session_actions.restore)

    def action_rename(self) -> None:
        self._run_on_main_screen(
            lambda: self.session_actions.rename(self.session_actions.current_session.id)
        )

    def action_fork(self) -> None:
        self._run_on_main_screen(
            lambda: self.session_actions.fork(self.session_actions.current_session.id)
        )

    def action_delete(self) -> None:
        self._run_on_main_screen(
            lambda: self.session_actions.delete(self.session_actions.current_session.id)
        )

    def action_step(self, by: int) -> None:
        self._run_on_main_screen(lambda: self.session_actions.step(by))

    async def action_settings(self) -> None:
        if self.main_screen.is_shown:
            await self.main_screen.toggle_settings()

    def action_retry(self) -> None:
        self._feed.retry()

    def action_stop(self) -> None:
        """Copy the selection, stop the answer, or quit on a second press."""
        if isinstance(self.screen, ToolScreen):
            self.screen.action_stop()
            return
        opened = self.main_screen.current_session
        selected = self.screen.get_selected_text() or _selected_text(self.focused)
        if selected:
            self.copy_to_clipboard(selected)
            self.show_message("copied")
            if isinstance(self.focused, Prompt):  # or a refused command could only be copied again
                self.focused.move_cursor(self.focused.cursor_location)
        elif self.session_actions.stop_shell():
            pass  # its output so far comes into the prompt
        elif opened is not None and opened.stop():
            self.prompt_queue.give_back(opened)
            self._last_stop_s = float("-inf")
        elif time.monotonic() - self._last_stop_s < _DOUBLE_PRESS_S:
            self.call_later(self.action_quit)
        else:
            self._last_stop_s = time.monotonic()
            self.show_message("nothing to stop; Ctrl+C again or Ctrl+Q quits")

    @work(group="answer_now")
    async def action_answer_now(self) -> None:
        """End the reasoning of the answer, which then continues."""
        opened = self.session_actions.current_session
        await self.session_actions.run_in_thread(opened.answer_now)

    def action_answer_call(self, decision: str) -> None:
        """Answer the question about a tool call that is shown."""
        shown, opened = self.main_screen.shown_question, self.session_actions.current_session
        if shown is not None and not self.main_screen.accepts_answer(time.monotonic()):
            return
        if shown is None or not opened.answer_question(shown, Decision(decision)):
            self.show_message("no tool waits to be run")
        else:
            self.show_message("")
        self.tick()

    @work(group="ask")
    async def action_regenerate(self) -> None:
        """Answer the last prompt again."""
        if not self.main_screen.is_shown:
            return
        opened = self.session_actions.current_session
        session = opened.chat
        self.main_screen.show_message("")
        self.main_screen.action_show_latest()
        if await self.session_actions.run_in_thread(opened.regenerate):
            notice = session.model_info is not None and session.repeat_notice()
            if notice:
                self.show_message(notice)
        self.tick()

    def action_figures(self) -> None:
        """Show all figures of the last answer, until the conversation is changed."""
        session = self.session_actions.current_session.chat
        completion, info = session.last_completion, session.model_info
        if completion is None or info is None:
            self.show_message(
                "no figures: they are kept of an answer until the session is opened or changed anew"
            )
        else:
            lines = verbose_stats_lines(completion, info.load_ms)
            self.show_message("\n".join(map(one_line, lines)), title="Figures of the last answer")

    def action_copy(self) -> None:
        """Copy the last answer; pressed again, its code blocks, the last one first."""
        turns = self.session_actions.current_session.chat.conversation.turns
        if turns:
            copied, message = self._answer_copies.next(turns[-1].answer)
            self.copy_to_clipboard(copied)
            self.show_message(message)

    def on_transcript_copy_requested(self, event: Transcript.CopyRequested) -> None:
        self.copy_to_clipboard(event.code)
        self.show_message(f"copied {units.format_count(event.code.count(chr(10)) + 1, 'line')}")

    def action_editor(self) -> None:
        """Edit the prompt in $EDITOR."""
        if not self.main_screen.is_shown:
            return
        prompt = self.main_screen.query_one(Prompt)
        try:
            with self.suspend(), self.session_manager.syncing_in_background(SYNC_PERIOD_S):
                text = edit_in_editor(prompt.full_text)
        except SuspendNotSupported:
            self.show_message("this terminal cannot run an editor", is_error=True)
        except InvalidRequest as error:
            self.show_message(error.message, is_error=True)
        else:
            prompt.set_text(text)

    async def action_quit(self) -> None:
        """Quit, after confirmation if something would be stopped or lost."""
        question = quit_confirmation.quit_question(
            self.session_manager,
            self.screen_stack,
            self.quantize_runner,
            self.main_screen.running_shell_line,
        )
        if not question:
            self._save_and_exit()
        elif not isinstance(self.screen, ConfirmDialog):
            self._confirm_quit(question)

    @work(group="leave")
    async def _confirm_quit(self, question: str) -> None:
        if await self.push_screen_wait(ConfirmDialog(question, yes="Quit", no="Stay")):
            self._save_and_exit()

    @work(group="leave", exclusive=True)
    async def _save_and_exit(self) -> None:
        self._is_quitting = True
        for each in self.session_manager.active_by_id.values():
            self.prompt_queue.give_back(each)
            self.session_actions.put_waiting_output(each)
        opened = self.main_screen.current_session
        if opened is not None:
            opened.unsent_prompt = self.main_screen.query_one(Prompt).full_text
            panels = self.main_screen.query(SettingsPanel)
            for typed in [edit for panel in panels for edit in panel.pending_edits()]:
                if opened.id == typed.session_id:
                    with contextlib.suppress(LocalgenError):
                        await asyncio.to_thread(opened.apply_setting, typed.setting, typed.text)
        if self.quantize_runner is not None:
            self.quantize_runner.stop()
        await asyncio.to_thread(self.session_manager.close)
        self.exit()

    def _run_on_main_screen(self, act: Callable[[], Coroutine[object, object, None]]) -> None:
        """Run an action only if the main screen is on top."""
        if self.main_screen.is_shown and self.main_screen.current_session is not None:
            prompt = self.main_screen.query_one(Prompt)
            prompt.hold_keys()  # later keys of a burst are for what the action shows

            async def run() -> None:
                async with self.prompt_queue.lock:  # a session that is being asked is not empty
                    prompt.release_keys()
                await act()

            self._run_in_worker(run())

    def _run_in_worker(self, act: Coroutine[object, object, None]) -> None:
        self.run_worker(act, group="session_actions")


def _selected_text(widget: object) -> str:
    return widget.selected_text if isinstance(widget, TextArea) else ""
