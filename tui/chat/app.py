"""`localgen tui`: its keys, what its widgets ask for, and the beat at which it is drawn."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import Lock
from collections.abc import Callable, Coroutine
from typing import ClassVar, Literal

from textual import work
from textual.app import SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import TextArea

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import inert, one_line
from localgen.chat import commands, saved_chats
from localgen.tui.base_app import Shell
from localgen.tui.chat import quit_confirmation, slash_commands
from localgen.tui.chat.compare import CompareScreen
from localgen.tui.chat.editor import edited
from localgen.tui.chat.main_screen import MainScreen
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.server_status import seen
from localgen.tui.chat.session_actions import Acts
from localgen.tui.chat.session_list import SessionList
from localgen.tui.chat.session_manager import Desk
from localgen.tui.chat.settings import SettingsPanel, Typed
from localgen.tui.feed import FIRST_RETRY_S, Feed, Lost, Seen, Watch
from localgen.tui.gauges.panel import Gauges
from localgen.tui.quantize.runner import Workshop
from localgen.tui.quantize.screen import QuantizeScreen
from localgen.tui.themes import ThemeChoice
from localgen.tui.widgets.dialog import Confirm

TICK_S, KEEP_S = 1 / 15, 1.0
_TWICE_S = 2.0
_HISTORY = 500
_ON_THE_MAIN_SCREEN = (
    *("new", "model", "settings", "search", "compare", "export", "editor"),
    *("step", "rename", "fork", "delete", "restore", "copy", "again", "quantize"),
)


class ChatApp(Shell):
    """desk: the sessions. watch: makes the way to look at the server. where: what it is called."""

    TITLE = "localgen tui"
    HELP_NOTES = (
        "Enter sends, Ctrl+J, Alt+Enter or Shift+Enter begins a line.\n"
        "Up and Down go through earlier prompts; Tab completes commands.\n"
        "Ctrl+A and Ctrl+E go to the ends of a line, Ctrl+W, Ctrl+U and Ctrl+K delete a word,\n"
        "what is before and what is behind; Ctrl+Z undoes.\n"
        "In the list of sessions: r renames, f forks, d deletes.\n\n"
        + "\n".join(f"{name:<9} {usage}" for name, usage, _ in slash_commands.table())
    )
    # but for Ctrl+C no key has priority: it would overtake what was typed before it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+n", "new", "New"),
        Binding("ctrl+o", "model", "Model"),
        Binding("ctrl+t", "settings", "Settings"),
        Binding("ctrl+f", "search", "Search"),
        Binding("ctrl+b", "compare", "Compare"),
        Binding("ctrl+c", "stop", "Stop", priority=True),
        Binding("ctrl+r", "again", "Ask again", show=False),
        Binding("ctrl+s", "export", "Save as a file", show=False),
        Binding("ctrl+g", "editor", "Prompt in $EDITOR", show=False),
        Binding("ctrl+up", "step(-1)", "Session above", show=False),
        Binding("ctrl+down", "step(1)", "Session below", show=False),
        Binding("f3", "rename", "Rename the session", show=False),
        Binding("f4", "fork", "Fork the session", show=False),
        Binding("f8", "delete", "Delete the session", show=False),
        Binding("f9", "restore", "Bring back what was deleted", show=False),
        Binding("ctrl+y", "copy", "Copy the last answer", show=False),
        Binding("f12", "retry", "Look at the server now", show=False),
        Binding("f10", "quantize", "Quantize a model", show=False),
    ]

    def __init__(
        self,
        desk: Desk,
        watch: Callable[[], Watch],
        where: str,
        choice: ThemeChoice | None = None,
        *,
        first_retry_s: float = FIRST_RETRY_S,
        workshop: Workshop | None = None,
    ) -> None:
        super().__init__(choice)
        self.desk = desk
        self._feed = Feed(watch, self.post_message, first_retry_s=first_retry_s)
        self._stopped_s = float("-inf")
        self._is_leaving = False
        self._settling, self._keeping, self._setting = Lock(), Lock(), Lock()
        names = slash_commands.Names(
            models=lambda: self.acts.models,
            chats=lambda: saved_chats.names(desk.house.state_dir),
            sessions=lambda: [listed.name for listed in desk.listed if listed.name],
        )
        self.main = MainScreen(desk, where, names)
        self.workshop = workshop or Workshop(
            desk.house.state_dir, is_elsewhere=bool(desk.house.url)
        )
        self.acts = Acts(self.main, desk, self.tell)

    def get_default_screen(self) -> Screen[None]:
        """The only one that is no dialog, but for comparisons."""
        return self.main

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What is about the session on the main screen is offered there only."""
        is_there = self.main.is_shown and self.main.opened is not None
        return action not in _ON_THE_MAIN_SCREEN or is_there

    def on_ready(self) -> None:
        """Paint first, then look at the server."""
        self.set_interval(TICK_S, self.tick)
        self.set_interval(KEEP_S, self.keep)
        self._feed.start()
        self.keep()
        self._remember()

    def on_unmount(self) -> None:
        self._feed.stop()

    # the store may be locked for seconds: whatever waits for it does so in a worker, as keys would
    # wait for what the app waits for

    @work(group="remember")
    async def _remember(self) -> None:
        with contextlib.suppress(LocalgenError):  # there is a prompt without a history
            prompts = await asyncio.to_thread(self.desk.house.store.prompts, _HISTORY)
            self.main.query_one(Prompt).remember(prompts)

    async def tick(self) -> None:
        """What has grown since the last time, on whatever screen is shown."""
        if self._is_leaving or not self.screen_stack:
            return
        for opened, line in self.desk.hear():
            name = "" if opened is self.main.opened else f"{opened.name}: "
            self.notify(one_line(f"{name}{line}"), timeout=10, markup=False)
        if any(not each.is_answering for each in self.desk.answering):
            self._settle()
        if isinstance(self.screen, CompareScreen):
            await self.screen.sync()
        elif isinstance(self.screen, QuantizeScreen):
            self.screen.sync()
        elif self.main.is_shown:
            await self.main.sync()
        self._tell_of_work()

    def _tell_of_work(self) -> None:
        if self.main.is_shown:
            run = self.workshop.run if self.workshop.is_running else None
            self.main.show_work("" if run is None else f"{run.line()} · F10")
        if not isinstance(self.screen, QuantizeScreen) and (news := self.workshop.news()):
            self.tell(news)

    @work(group="settle")
    async def _settle(self) -> None:
        if not self._settling.locked():
            async with self._settling:
                await self.acts.do(self.desk.settle)

    @work(group="keep")
    async def keep(self) -> None:
        """Write what has grown; take over what other programs have written."""
        if self._is_leaving or self._keeping.locked():
            return
        async with self._keeping:
            await self.acts.do(self.desk.keep)
            opened = self.main.opened
            if opened is None or opened.id not in self.desk.open:
                await self.acts.show(self.desk.first)

    def tell(self, message: str, *, fault: bool = False, title: str = "") -> None:
        """Say it where the user looks. title: of a long one."""
        if self.main.is_shown:
            self.main.tell(inert(message), fault=fault, title=title)
        else:
            severe: Literal["error", "information"] = "error" if fault else "information"
            self.notify(one_line(message), severity=severe, timeout=6, markup=False)

    # --- what widgets ask for ---

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        if self.main.holds_back():
            return
        self.main.tell("")
        if commands.is_command(event.text):
            self._command(event.text)
        else:
            self._ask(event.text)

    @work(group="ask")
    async def _ask(self, text: str) -> None:
        opened = self.acts.opened
        if await self.acts.do(lambda: opened.ask(text)):
            self.main.query_one(Prompt).sent(text)
            opened.draft = ""
            await self.acts.do(self.desk.reload)
            await self.tick()

    def _command(self, line: str) -> None:
        try:
            own = slash_commands.own(line)
        except InvalidRequest as error:
            self.tell(error.message, fault=True)
            return
        self.main.query_one(Prompt).sent(line)
        if own is None:
            self._later(self.acts.obey(self.acts.opened, line))
        else:
            self._later(self.acts.obey_own(*own))

    def on_session_list_wanted(self, event: SessionList.Wanted) -> None:
        match event.action:
            case "open":
                self._later(self.acts.open(event.session))
                self.main.query_one(Prompt).focus()
            case "rename":
                self._later(self.acts.rename(event.session))
            case "fork":
                self._later(self.acts.fork(event.session))
            case "delete":
                self._later(self.acts.delete(event.session))

    def on_settings_panel_changed(self, event: SettingsPanel.Changed) -> None:
        self._set(event.typed)

    @work(group="set")
    async def _set(self, typed: Typed) -> None:
        panel = self.main.query_one(SettingsPanel)
        async with self._setting:  # in the order in which they were left
            opened = self.desk.open.get(typed.session)
            if opened is None:
                return
            try:
                await asyncio.to_thread(opened.set, typed.setting, typed.text)
            except LocalgenError as error:
                panel.refused(typed, inert(error.message))
            else:
                panel.taken(typed)
            self.main.show_settings()

    def on_seen(self, message: Seen) -> None:
        """A reading of the server, at most four times a second."""
        if self.main.server.status == "LOST":
            self.notify("The server is back.", timeout=4)
        is_elsewhere = bool(self.desk.house.url)
        self.main.server = seen(message.reading.snapshot, is_elsewhere=is_elsewhere)
        if self.main.is_whole:
            self.main.query_one(Gauges).reading = message.reading

    def on_lost(self, message: Lost) -> None:
        """Nothing was heard of it; the feed tries again."""
        is_elsewhere = bool(self.desk.house.url)
        self.main.server = self.main.server.after(message, is_elsewhere=is_elsewhere)

    # --- keys ---

    def action_new(self) -> None:
        self._on_main(self.acts.new)

    def action_model(self) -> None:
        self._on_main(self.acts.pick_model)

    def action_quantize(self) -> None:
        self._on_main(lambda: self.acts.quantize(self.workshop))

    def action_search(self) -> None:
        self._on_main(self.acts.search)

    def action_compare(self) -> None:
        self._on_main(self.acts.compare)

    def action_export(self) -> None:
        self._on_main(self.acts.export)

    def action_restore(self) -> None:
        self._on_main(self.acts.restore)

    def action_rename(self) -> None:
        self._on_main(lambda: self.acts.rename(self.acts.opened.id))

    def action_fork(self) -> None:
        self._on_main(lambda: self.acts.fork(self.acts.opened.id))

    def action_delete(self) -> None:
        self._on_main(lambda: self.acts.delete(self.acts.opened.id))

    def action_step(self, by: int) -> None:
        self._on_main(lambda: self.acts.step(by))

    def action_settings(self) -> None:
        if self.main.is_shown:
            self.main.toggle_settings()

    def action_retry(self) -> None:
        self._feed.retry()

    def action_stop(self) -> None:
        """Copy what is selected; or stop the answer; or leave, at the second time."""
        if isinstance(self.screen, CompareScreen | QuantizeScreen):
            self.screen.action_stop()
            return
        selected = self.screen.get_selected_text() or _selected_in(self.focused)
        if selected:
            self.copy_to_clipboard(selected)
            self.notify("Copied.", timeout=2)
        elif self.main.opened is not None and self.main.opened.stop():
            self._stopped_s = float("-inf")
        elif time.monotonic() - self._stopped_s < _TWICE_S:
            self.call_later(self.action_quit)
        else:
            self._stopped_s = time.monotonic()
            self.tell("nothing is being written here; Ctrl+C again or Ctrl+Q leaves")

    @work(group="ask")
    async def action_again(self) -> None:
        """Ask the last prompt again."""
        if not self.main.is_shown:
            return
        opened = self.acts.opened
        session = opened.session
        self.main.tell("")
        if await self.acts.do(opened.ask_again):
            same = session.info is not None and session.why_same_again()
            if same:
                self.tell(f"{same}, so the answer will be the same")
        await self.tick()

    def action_copy(self) -> None:
        turns = self.acts.opened.session.conversation.turns
        if turns:
            self.copy_to_clipboard(turns[-1].answer)
            self.notify("The last answer is copied.", timeout=3)

    def action_editor(self) -> None:
        """The prompt in $EDITOR, as in the chat in a terminal."""
        if not self.main.is_shown:
            return
        prompt = self.main.query_one(Prompt)
        try:
            with self.suspend(), self.desk.keeping(KEEP_S):
                text = edited(prompt.whole)
        except SuspendNotSupported:
            self.tell("this terminal cannot be lent to an editor", fault=True)
        except InvalidRequest as error:
            self.tell(error.message, fault=True)
        else:
            prompt.put(text)

    async def action_quit(self) -> None:
        """Leave; ask first if that ends or loses something."""
        question = quit_confirmation.question(self.desk, self.screen_stack, self.workshop)
        if not question:
            self._leave()
        elif not isinstance(self.screen, Confirm):
            self._leave_if_sure(question)

    @work(group="leave")
    async def _leave_if_sure(self, question: str) -> None:
        if await self.push_screen_wait(Confirm(question, yes="Leave", no="Stay")):
            self._leave()

    @work(group="leave", exclusive=True)
    async def _leave(self) -> None:
        self._is_leaving = True
        opened = self.main.opened
        if opened is not None:
            opened.draft = self.main.query_one(Prompt).whole
            for typed in self.main.query_one(SettingsPanel).changed():
                if opened.id == typed.session:
                    with contextlib.suppress(LocalgenError):
                        await asyncio.to_thread(opened.set, typed.setting, typed.text)
        self.workshop.stop()
        await asyncio.to_thread(self.desk.close)
        self.exit()

    def _on_main(self, act: Callable[[], Coroutine[object, object, None]]) -> None:
        """Only where there is nothing before the main screen."""
        if self.main.is_shown and self.main.opened is not None:
            self._later(act())

    def _later(self, act: Coroutine[object, object, None]) -> None:
        self.run_worker(act, group="acts")


def _selected_in(widget: object) -> str:
    return widget.selected_text if isinstance(widget, TextArea) else ""
