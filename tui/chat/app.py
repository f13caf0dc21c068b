"""`localgen tui`: carries out what is asked for on its screens, in threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

from textual import work
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import TextArea

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.chats import commands, parameters, saved
from localgen.chats.inert import inert, one_line
from localgen.tui.chat import slash, variants
from localgen.tui.chat.ask_text import AskText
from localgen.tui.chat.compare import CompareScreen, CompareSetup
from localgen.tui.chat.desk import Desk, Hit
from localgen.tui.chat.export import export
from localgen.tui.chat.main_screen import MainScreen
from localgen.tui.chat.models import ModelPicker
from localgen.tui.chat.open_session import OpenSession
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.search import SearchScreen
from localgen.tui.chat.session_list import SessionList
from localgen.tui.chat.settings import CTX, SYSTEM, SettingsPanel
from localgen.tui.chat.shelf import SessionShelf
from localgen.tui.chat.transcript import Transcript
from localgen.tui.feed import FIRST_RETRY_S, Feed, Lost, Seen, Watch
from localgen.tui.gauges.panel import Gauges
from localgen.tui.shell import Shell
from localgen.tui.themes import ThemeChoice
from localgen.tui.top.confirm import Confirm

TICK_S, KEEP_S = 1 / 15, 1.0
_TWICE_S = 2.0
_HISTORY = 500


class ChatApp(Shell):
    """desk: the sessions. watch: makes the way to look at the server. where: what it is called.

    is_elsewhere: it is not ours, and fetches its models itself.
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
        self._is_elsewhere = is_elsewhere
        self._feed = Feed(watch, self.post_message, first_retry_s=first_retry_s)
        self._models: list[str] = []
        self._deleted: list[int] = []
        self._stopped_s = 0.0
        self._was_seen = self._is_leaving = False
        names = slash.Names(
            models=lambda: self._models,
            chats=lambda: saved.names(desk.house.state_dir),
            sessions=lambda: [listed.name for listed in desk.listed if listed.name],
        )
        self.main = MainScreen(desk, where, names)

    def get_default_screen(self) -> Screen[None]:
        """The only one that is no dialog, but for comparisons."""
        return self.main

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
        if self._is_leaving or not self.desk.open:
            return
        if any(each.answering and not each.is_answering for each in self.desk.answering):
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
        await self._do(self.desk.keep)
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

    @work(group="ask")
    async def on_prompt_sent(self, event: Prompt.Sent) -> None:
        prompt, opened = self.main.query_one(Prompt), self._opened
        self.main.tell("")
        if not commands.is_command(event.text):
            if await self._do(lambda: opened.ask(event.text)):
                prompt.sent(event.text)
                opened.draft = ""
                await asyncio.to_thread(self.desk.reload)
                await self.tick()
            return
        try:
            own = slash.own(event.text)
        except InvalidRequest as error:
            self.tell(error.message, fault=True)
            return
        prompt.sent(event.text)
        if own is None:
            await self._obey(opened, event.text)
        else:
            self._obey_here(*own)

    async def on_session_list_wanted(self, event: SessionList.Wanted) -> None:
        match event.action:
            case "open":
                await self._open(event.session)
                self.main.query_one(Prompt).focus()
            case "rename":
                self._ask_name(event.session)
            case "fork":
                self._fork(event.session)
            case "delete":
                self._ask_delete(event.session)

    async def on_settings_panel_changed(self, event: SettingsPanel.Changed) -> None:
        opened, panel = self._opened, self.main.query_one(SettingsPanel)
        try:
            await asyncio.to_thread(_change, opened, event.setting, event.text)
            panel.refuse("")
        except LocalgenError as error:
            panel.refuse(inert(error.message))
        self.main.show_settings()

    def on_seen(self, message: Seen) -> None:
        """A reading of the server, at most four times a second."""
        if self._was_seen and self.main.server == "LOST":
            self.notify("The server is back.", timeout=4)
        self._was_seen, self.main.server = True, "LIVE"
        if self.main.is_mounted:
            self.main.query_one(Gauges).reading = message.reading

    def on_lost(self, message: Lost) -> None:
        """Nobody answers; the feed tries again."""
        self.main.server = "LOST" if self._was_seen else "WAITING"

    # --- keys ---

    @work(group="session")
    async def action_new(self) -> None:
        if await self._show(self.desk.first):
            self.main.query_one(Prompt).focus()

    def action_stop(self) -> None:
        if isinstance(self.screen, CompareScreen):
            self.screen.action_stop()
            return
        selected = self.screen.get_selected_text() or _selected_in(self.focused)
        if selected:
            self.copy_to_clipboard(selected)
            self.notify("Copied.", timeout=2)
        elif self.main.opened is not None and self.main.opened.stop():
            self._stopped_s = 0.0
        elif time.monotonic() - self._stopped_s < _TWICE_S:
            self.call_later(self.action_quit)
        else:
            self._stopped_s = time.monotonic()
            self.tell("nothing is being written here; Ctrl+C again or Ctrl+Q leaves")

    @work(group="ask")
    async def action_again(self) -> None:
        opened = self._opened
        self.main.tell("")
        if opened.answering is None:
            same = opened.session.info is not None and opened.session.why_same_again()
            if same:
                self.tell(f"{same}, so the answer will be the same")
        await self._do(opened.ask_again)
        await self.tick()

    def action_model(self) -> None:
        self._pick_model("")

    def action_settings(self) -> None:
        if self.main.is_current:
            self.main.toggle_settings()

    def action_search(self, text: str = "") -> None:
        def chosen(hit: Hit | None) -> None:
            if hit is not None:
                self._go_to(hit)

        if self.main.is_current:
            self.push_screen(SearchScreen(self.desk.search, text), chosen)

    def action_compare(self) -> None:
        if not self.main.is_current:
            return

        def compare(compared: list[variants.Variant] | None) -> None:
            if compared is not None:
                self._compare(compared)

        model = shlex.quote(self._opened.session.asked or "tiny")
        text = f"{model}\n{model} temperature=0\n"
        setup = CompareSetup(text, self._opened.session.options.params)
        self.push_screen(setup, compare)

    def action_export(self) -> None:
        if self.main.is_current:
            self._export("")

    def action_rename(self) -> None:
        if self.main.is_current:
            self._ask_name(self._opened.id)

    def action_fork(self) -> None:
        if self.main.is_current:
            self._fork(self._opened.id)

    def action_delete(self) -> None:
        if self.main.is_current:
            self._ask_delete(self._opened.id)

    @work(group="session")
    async def action_restore(self) -> None:
        if not self._deleted:
            self.tell("nothing was deleted since the program began")
            return
        session = self._deleted.pop()
        await self._do(lambda: self.desk.restore(session))
        await self._open(session)

    async def action_step(self, by: int) -> None:
        if not self.main.is_current:
            return
        ids = [listed.id for listed in self.desk.listed]
        if self._opened.id in ids and len(ids) > 1:
            await self._open(ids[(ids.index(self._opened.id) + by) % len(ids)])

    def action_copy(self) -> None:
        turns = self._opened.session.conversation.turns
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
                text = _edited(prompt.whole)
        except Exception as error:  # an editor, or a terminal that cannot be lent to one
            self.tell(f"$EDITOR did not run: {error}", fault=True)
            return
        prompt.put(text)

    async def action_quit(self) -> None:
        """Leave; ask first if answers are being written."""
        count = len(self.desk.answering)
        if not count:
            self._leave()
            return

        def answered(sure: bool | None) -> None:
            if sure:
                self._leave()

        if not isinstance(self.screen, Confirm):
            what = "1 answer is" if count == 1 else f"{count} answers are"
            question = f"{what} still being written. Leave and stop? What is there is kept."
            self.push_screen(Confirm(question, yes="Leave", no="Stay"), answered)

    # --- how it is done ---

    @property
    def _opened(self) -> OpenSession:
        assert self.main.opened is not None
        return self.main.opened

    async def _do(self, work: Callable[[], object]) -> bool:
        """Do it in a thread; whether that went well. An error is said."""
        try:
            await asyncio.to_thread(work)
        except LocalgenError as error:
            self.tell(error.message, fault=True)
            return False
        return True

    async def _show(self, get: Callable[[], OpenSession]) -> bool:
        """Go to the session that is got in a thread; whether there is one."""
        try:
            opened = await asyncio.to_thread(get)
        except LocalgenError as error:
            self.tell(error.message, fault=True)
            return False
        await self.main.show(opened)
        return True

    async def _open(self, session: int) -> None:
        self.main.tell("")
        await self._show(lambda: self.desk.get(session))

    async def _obey(self, opened: OpenSession, line: str) -> None:
        try:
            outcome = await asyncio.to_thread(opened.obey, line, lambda share: None)
        except LocalgenError as error:
            self.tell(error.message, fault=True)
            return
        match outcome:
            case commands.Say(text):
                self.tell(text)
            case commands.Ask(prompt):
                await self._do(lambda: opened.ask(prompt))
        self.main.show_settings()
        await self.tick()

    def _obey_here(self, name: str, argument: str) -> None:
        match name:
            case "/new":
                self.action_new()
            case "/rename" if argument:
                self._rename(self._opened.id, argument)
            case "/rename":
                self._ask_name(self._opened.id)
            case "/fork":
                self._fork(self._opened.id, argument)
            case "/switch":
                self._switch(argument)
            case "/delete":
                self._ask_delete(self._opened.id)
            case "/search":
                self.action_search(argument)
            case "/export":
                self._export(argument)
            case "/compare":
                self.action_compare()
            case "/model":
                self._pick_model(argument)
            case "/regen":
                self.action_again()
            case "/help":
                self.action_keys()
            case "/bye":
                self.call_later(self.action_quit)

    @work(group="session")
    async def _rename(self, session: int, name: str) -> None:
        await self._do(lambda: self.desk.rename(session, name))

    def _ask_name(self, session: int) -> None:
        def named(name: str | None) -> None:
            if name is not None:
                self._rename(session, name)

        known = next((each.name for each in self.desk.listed if each.id == session), "")
        self.push_screen(AskText("What is the session to be called?", known), named)

    @work(group="session")
    async def _fork(self, session: int, name: str = "") -> None:
        await self._show(lambda: self.desk.fork(self.desk.get(session), name))

    @work(group="session")
    async def _switch(self, name: str) -> None:
        found = [listed for listed in self.desk.listed if listed.name == name]
        if found:
            await self._open(found[0].id)
        elif name:
            self.tell(f"no session {name}", fault=True)
        else:
            self.main.action_list()

    def _ask_delete(self, session: int) -> None:
        def answered(sure: bool | None) -> None:
            if sure:
                self._delete(session)

        name = next((each.name for each in self.desk.listed if each.id == session), "")
        question = f"Delete {one_line(name) or 'this session'}? F9 brings it back for a month."
        question = question.replace(" for a month", " while the program runs")
        self.push_screen(Confirm(question, yes="Delete", no="Keep"), answered)

    @work(group="session")
    async def _delete(self, session: int) -> None:
        before = [listed.id for listed in self.desk.listed]
        if not await self._do(lambda: self.desk.delete(session)):
            return
        self._deleted.append(session)
        self.tell("deleted; F9 brings it back")
        if self._opened.id == session:
            self.main.opened = None  # its draft went with it
            at = before.index(session) if session in before else 0
            rest = [listed.id for listed in self.desk.listed]
            near = rest[min(at, len(rest) - 1)] if rest else None
            await self._show(lambda: self.desk.first() if near is None else self.desk.get(near))

    def _export(self, path: str) -> None:
        def write(name: str | None) -> None:
            if name is not None:
                self._write(name)

        if path:
            write(path)
        else:
            name = one_line(self._opened.name).replace("/", "-")
            self.push_screen(AskText("Write it to which file? (.md or .json)", f"{name}.md"), write)

    @work(group="session")
    async def _write(self, name: str) -> None:
        opened = self._opened
        if await self._do(lambda: export(opened, name)):
            self.tell(f"written to {Path(name).expanduser().absolute()}")

    def _pick_model(self, wanted: str) -> None:
        if not self.main.is_current:
            return
        opened = self._opened

        def chosen(name: str | None) -> None:
            if name is not None and opened.session.info is not None:
                self.tell("\n".join((f"now {name}", *opened.session.info.notes)))
            self.main.show_settings()
            self._look_up_models(opened)

        shelf = SessionShelf(opened, is_elsewhere=self._is_elsewhere)
        self.push_screen(ModelPicker(shelf, wanted, opened.session.asked or "tiny"), chosen)

    @work(group="models", exclusive=True)
    async def _look_up_models(self, opened: OpenSession) -> None:
        with contextlib.suppress(LocalgenError):  # a completion has no place to say so
            cards = await asyncio.to_thread(opened.session.client.models)
            self._models = [card.name for card in cards]

    @work(group="session")
    async def _go_to(self, hit: Hit) -> None:
        await self._open(hit.session)
        if hit.place is not None:
            await self.main.query_one(Transcript).go_to(hit.place)

    @work(group="session")
    async def _compare(self, compared: list[variants.Variant]) -> None:
        try:
            made = await asyncio.to_thread(self.desk.compare, self._opened, compared)
        except LocalgenError as error:
            self.tell(error.message, fault=True)
            return
        columns = list(zip(made, (each.label for each in compared), strict=True))
        self.push_screen(CompareScreen(columns, lambda said: self.tell(said, fault=True)))

    @work(group="leave", exclusive=True)
    async def _leave(self) -> None:
        self._is_leaving = True
        opened = self.main.opened
        if opened is not None:
            opened.draft = self.main.query_one(Prompt).whole
        await asyncio.to_thread(self.desk.close)
        self.exit()


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


def _edited(text: str) -> str:
    """The text as the user's editor leaves it."""
    editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.md"
        path.write_text(text, encoding="utf-8", errors="replace")
        subprocess.run([*editor, str(path)], check=True)
        return path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
