"""`localgen tui`: its keys, what its widgets ask for, and the beat at which it is drawn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import ClassVar, Literal

from textual import work
from textual.app import SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import TextArea

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.chats import commands, parameters, saved
from localgen.chats.inert import inert, one_line
from localgen.tui.chat import slash
from localgen.tui.chat.acts import Acts
from localgen.tui.chat.compare import CompareScreen
from localgen.tui.chat.desk import Desk
from localgen.tui.chat.editor import edited
from localgen.tui.chat.main_screen import MainScreen
from localgen.tui.chat.open_session import OpenSession
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.session_list import SessionList
from localgen.tui.chat.settings import CTX, SYSTEM, SettingsPanel
from localgen.tui.confirm import Confirm
from localgen.tui.feed import FIRST_RETRY_S, Feed, Lost, Seen, Watch
from localgen.tui.gauges.panel import Gauges
from localgen.tui.shell import Shell
from localgen.tui.themes import ThemeChoice

TICK_S, KEEP_S = 1 / 15, 1.0
_TWICE_S = 2.0
_HISTORY = 500
_ON_THE_MAIN_SCREEN = (
    *("new", "model", "settings", "search", "compare", "export", "editor"),
    *("step", "rename", "fork", "delete", "restore", "copy"),
)


class ChatApp(Shell):
    """desk: the sessions. watch: makes the way to look at the server. where: what it is called.

    is_elsewhere: the server is not ours, which fetches its models itself.
    """

    TITLE = "localgen tui"
    HELP_NOTES = (
        "Enter sends, Ctrl+J, Alt+Enter or Shift+Enter begins a line.\n"
        "Up and Down go through earlier prompts; Tab completes commands.\n"
        "In the list of sessions: r renames, f forks, d deletes.\n\n"
        + "\n".join(f"{name:<9} {usage}" for name, usage, _ in slash.table())
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
    ]

    def __init__(
        self,
        desk: Desk,
        watch: Callable[[], Watch],
        where: str,
        choice: ThemeChoice | None = None,
        *,
        is_elsewhere: bool = False,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        super().__init__(choice)
        self.desk = desk
        self._feed = Feed(watch, self.post_message, first_retry_s=first_retry_s)
        self._stopped_s = float("-inf")
        self._was_seen = self._is_leaving = False
        names = slash.Names(
            models=lambda: self.acts.models,
            chats=lambda: saved.names(desk.house.state_dir),
            sessions=lambda: [listed.name for listed in desk.listed if listed.name],
        )
        self.main = MainScreen(desk, where, names)
        self.acts = Acts(self.main, desk, self.tell, is_elsewhere=is_elsewhere)

    def get_default_screen(self) -> Screen[None]:
        """The only one that is no dialog, but for comparisons."""
        return self.main

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What is about the session on the main screen is offered there only."""
        return action not in _ON_THE_MAIN_SCREEN or self.main.is_current

    async def on_ready(self) -> None:
        """Paint first, then look at the server."""
        await self.main.show(await asyncio.to_thread(self.desk.first))
        prompts = await asyncio.to_thread(self.desk.house.store.prompts, _HISTORY)
        self.main.query_one(Prompt).remember(prompts)
        self.set_interval(TICK_S, self.tick)
        self.set_interval(KEEP_S, self.keep)
        self._feed.start()

    def on_unmount(self) -> None:
        self._feed.stop()

    async def tick(self) -> None:
        """What has grown since the last time, on whatever screen is shown."""
        if self._is_leaving or not self.screen_stack:
            return
        if any(not each.is_answering for each in self.desk.answering):
            await asyncio.to_thread(self.desk.settle)
        if isinstance(self.screen, CompareScreen):
            await self.screen.sync()
        elif self.main.is_current:
            await self.main.sync()

    @work(exclusive=True, group="keep")
    async def keep(self) -> None:
        """Write what has grown; take over what other programs have written."""
        if self._is_leaving:
            return
        await self.acts.do(self.desk.keep)
        opened = self.main.opened
        if opened is not None and opened.id not in self.desk.open:
            await self.main.show(await asyncio.to_thread(self.desk.first))

    def tell(self, message: str, *, fault: bool = False) -> None:
        """Say it where the user looks."""
        if self.main.is_current:
            self.main.tell(inert(message), fault=fault)
        else:
            severe: Literal["error", "information"] = "error" if fault else "information"
            self.notify(one_line(message), severity=severe, timeout=6, markup=False)

    # --- what widgets ask for ---

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        if self.main.opened is None:
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
            own = slash.own(line)
        except InvalidRequest as error:
            self.tell(error.message, fault=True)
            return
        self.main.query_one(Prompt).sent(line)
        if own is None:
            self._later(self.acts.obey(self.acts.opened, line))
        else:
            self._obey(*own)

    def _obey(self, name: str, argument: str) -> None:
        acts = self.acts
        match name:
            case "/new":
                self._later(acts.new())
            case "/rename":
                self._later(acts.rename(acts.opened.id, argument))
            case "/fork":
                self._later(acts.fork(acts.opened.id, argument))
            case "/switch":
                self._later(acts.switch(argument))
            case "/delete":
                self._later(acts.delete(acts.opened.id))
            case "/search":
                self._later(acts.search(argument))
            case "/export":
                self._later(acts.export(argument))
            case "/compare":
                self._later(acts.compare())
            case "/model":
                self._later(acts.pick_model(argument))
            case "/regen":
                self.action_again()
            case "/help":
                self.action_keys()
            case "/bye":
                self.call_later(self.action_quit)

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

    async def on_settings_panel_changed(self, event: SettingsPanel.Changed) -> None:
        panel = self.main.query_one(SettingsPanel)
        try:
            await asyncio.to_thread(_change, self.acts.opened, event.setting, event.text)
            panel.refuse("")
        except LocalgenError as error:
            panel.refuse(inert(error.message))
        self.main.show_settings()

    def on_seen(self, message: Seen) -> None:
        """A reading of the server, at most four times a second."""
        if self.main.server == "LOST":
            self.notify("The server is back.", timeout=4)
        self._was_seen, self.main.server = True, "LIVE"
        if self.main.is_whole:
            self.main.query_one(Gauges).reading = message.reading

    def on_lost(self, message: Lost) -> None:
        """Nobody answers; the feed tries again."""
        self.main.server = "LOST" if self._was_seen else "WAITING"

    # --- keys ---

    def action_new(self) -> None:
        self._on_main(self.acts.new)

    def action_model(self) -> None:
        self._on_main(self.acts.pick_model)

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
        if self.main.is_current:
            self.main.toggle_settings()

    def action_stop(self) -> None:
        """Copy what is selected; or stop the answer; or leave, at the second time."""
        if isinstance(self.screen, CompareScreen):
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
        if not self.main.is_current:
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
        if not self.main.is_current:
            return
        prompt = self.main.query_one(Prompt)
        try:
            with self.suspend():
                text = edited(prompt.whole)
        except SuspendNotSupported:
            self.tell("this terminal cannot be lent to an editor", fault=True)
        except InvalidRequest as error:
            self.tell(error.message, fault=True)
        else:
            prompt.put(text)

    async def action_quit(self) -> None:
        """Leave; ask first if answers are being written."""
        count = len(self.desk.answering)
        if not count:
            self._leave()
        elif not isinstance(self.screen, Confirm):
            self._leave_if_sure(count)

    @work(group="leave")
    async def _leave_if_sure(self, count: int) -> None:
        what = "1 answer is" if count == 1 else f"{count} answers are"
        question = f"{what} still being written. Leave and stop? What is there is kept."
        if await self.push_screen_wait(Confirm(question, yes="Leave", no="Stay")):
            self._leave()

    @work(group="leave", exclusive=True)
    async def _leave(self) -> None:
        self._is_leaving = True
        opened = self.main.opened
        if opened is not None:
            opened.draft = self.main.query_one(Prompt).whole
        await asyncio.to_thread(self.desk.close)
        self.exit()

    def _on_main(self, act: Callable[[], Coroutine[object, object, None]]) -> None:
        """Only where there is nothing before the main screen."""
        if self.main.is_current and self.main.opened is not None:
            self._later(act())

    def _later(self, act: Coroutine[object, object, None]) -> None:
        self.run_worker(act, group="acts")


def _change(opened: OpenSession, setting: str, text: str) -> None:
    """Take over a setting of the panel. InvalidRequest: it does not do."""
    if setting == SYSTEM:
        opened.set_system(text)
    elif setting == CTX:
        if text != "default" and not (text.isdecimal() and int(text) > 0):
            raise InvalidRequest(f"ctx {text}: give a number of tokens, or nothing")
        opened.set_ctx(None if text == "default" else int(text))
    else:
        params = opened.session.options.params
        opened.set_params(parameters.with_parameter(params, setting, text))


def _selected_in(widget: object) -> str:
    return widget.selected_text if isinstance(widget, TextArea) else ""
