"""What is done to sessions: asked of the user where it has to be, carried out in threads."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.chat import commands
from localgen.chat.session_store import Kept
from localgen.tui.chat.active_session import UNNAMED, OpenSession, Stopped
from localgen.tui.chat.compare import CompareScreen, CompareSetup, Variant
from localgen.tui.chat.export import export
from localgen.tui.chat.main_screen import MainScreen
from localgen.tui.chat.model_picker import ModelPicker, SessionShelf
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.search import SearchScreen
from localgen.tui.chat.session_manager import Desk, Hit
from localgen.tui.chat.text_dialog import AskText
from localgen.tui.chat.transcript import Transcript
from localgen.tui.quantize.runner import Workshop
from localgen.tui.quantize.screen import QuantizeScreen
from localgen.tui.widgets.dialog import Confirm

Tell = Callable[..., None]
# commands that are keys as well
_ACTIONS = {"/regen": "again", "/help": "keys", "/bye": "quit", "/quantize": "quantize"}


class Acts:
    """On the main screen of an app. tell: says something to the user."""

    def __init__(self, main: MainScreen, desk: Desk, tell: Tell) -> None:
        self.models: list[str] = []
        self._main, self._desk, self._tell = main, desk, tell
        self._ways_back: list[Callable[[], Awaitable[object]]] = []
        self._bound_for: int | None = None  # the session that is being opened
        self._shows = 0

    @property
    def opened(self) -> OpenSession:
        """The session on the screen. What needs it is not offered before there is one."""
        assert self._main.opened is not None
        return self._main.opened

    async def do(self, work: Callable[[], object]) -> bool:
        """Do it in a thread; whether that went well. An error is said."""
        try:
            await asyncio.to_thread(work)
        except LocalgenError as error:
            self._tell(error.message, fault=True)
            return False
        return True

    async def show(self, get: Callable[[], OpenSession]) -> bool:
        """Go to the session that is got in a thread; whether it was gone to: it was there, and no
        other has been asked for since."""
        self._main.turn_away()
        self._shows += 1
        number = self._shows
        try:
            opened = await asyncio.to_thread(get)
        except LocalgenError as error:
            self._tell(error.message, fault=True)
            if number == self._shows:
                await self._main.turn_back()
            return False
        if number != self._shows:
            return False
        await self._main.show(opened)
        return True

    async def open(self, session: int) -> None:
        self._main.tell("")
        self._bound_for = session
        await self.show(lambda: self._desk.get(session))
        if self._bound_for == session:
            self._bound_for = None

    async def new(self) -> None:
        if await self.show(self._desk.first):
            self._main.query_one(Prompt).focus()

    async def step(self, by: int) -> None:
        """The next session of the list, or the one before."""
        ids = [listed.id for listed in self._desk.listed]
        start = self.opened.id if self._bound_for is None else self._bound_for
        if start in ids and len(ids) > 1:
            await self.open(ids[(ids.index(start) + by) % len(ids)])

    async def switch(self, name: str) -> None:
        """To a session by its name; without one, to the list."""
        found = [listed for listed in self._desk.listed if listed.name == name]
        if found:
            await self.open(found[0].id)
        elif name:
            self._tell(f"no session {name}", fault=True)
        else:
            self._main.action_list()

    async def rename(self, session: int, name: str = "") -> None:
        """name: asked for if it is not given."""
        if not name:
            question = AskText("What is the session to be called?", self._name(session))
            given: str | None = await self._main.app.push_screen_wait(question)
            name = given or ""
        if name:
            await self.do(lambda: self._desk.rename(session, name))
            await self._main.sync()

    async def fork(self, session: int, name: str = "") -> None:
        await self.show(lambda: self._desk.fork(self._desk.get(session), name))

    async def delete(self, session: int) -> None:
        """When the user is sure."""
        name = one_line(self._name(session)) or UNNAMED
        question = f"Delete “{name}”? F9 brings it back while the program runs."
        if not await self._main.app.push_screen_wait(Confirm(question, yes="Delete", no="Keep")):
            return
        before = [listed.id for listed in self._desk.listed]
        if not await self.do(lambda: self._desk.delete(session)):
            return
        self._ways_back.append(lambda: self._undelete(session))
        self._tell("deleted; F9 brings it back")
        if self.opened.id == session:
            at = before.index(session) if session in before else 0
            rest = [listed.id for listed in self._desk.listed]
            near = rest[min(at, len(rest) - 1)] if rest else None
            await self.show(lambda: self._desk.first() if near is None else self._desk.get(near))

    async def restore(self) -> None:
        """What was deleted last: a session, or turns of one."""
        if not self._ways_back:
            self._tell("nothing was deleted since the program began")
            return
        await self._ways_back.pop()()

    async def export(self, path: str = "") -> None:
        """path: asked for if it is not given."""
        opened = self.opened
        if not path:
            name = one_line(opened.name).replace("/", "-")
            question = AskText("Write it to which file? (.md or .json)", f"{name}.md")
            given: str | None = await self._main.app.push_screen_wait(question)
            path = given or ""
        if path and await self.do(lambda: export(opened, path)):
            self._tell(f"written to {Path(path).expanduser().absolute()}")

    async def search(self, text: str = "") -> None:
        hit: Hit | None = await self._main.app.push_screen_wait(
            SearchScreen(self._desk.search, text)
        )
        if hit is None:
            return
        await self.open(hit.session)
        if hit.place is not None:
            await self._main.query_one(Transcript).go_to(hit.place)

    async def pick_model(self, wanted: str = "") -> None:
        """wanted: loaded at once, if there is a model of that name."""
        opened = self.opened
        picker = ModelPicker(SessionShelf(opened), wanted, opened.session.asked_name)
        name = await self._main.app.push_screen_wait(picker)
        if name is not None and opened.session.info is not None:
            self._tell("\n".join((f"now {name}", *opened.session.info.notes)))
        self._main.show_settings()
        await self._look_up_models(opened)

    async def compare(self) -> None:
        """Ask what is to be compared, then show it."""
        opened = self.opened
        session = opened.session
        model = shlex.quote(session.asked_name) if session.asked_name else "MODEL"
        setup = CompareSetup(
            f"{model}\n{model} temperature=0\n",
            session.options.params,
            is_elsewhere=session.is_elsewhere,
        )
        compared: list[Variant] | None = await self._main.app.push_screen_wait(setup)
        if compared is None:
            return
        try:
            made = await asyncio.to_thread(self._desk.compare, opened, compared)
        except LocalgenError as error:
            self._tell(error.message, fault=True)
            return
        columns = list(zip(made, (each.label for each in compared), strict=True))
        await self._main.app.push_screen(CompareScreen(columns, self._tell))

    async def quantize(self, workshop: Workshop) -> None:
        """Show the screen; then a session with what was made there, if that is wanted."""
        if not await self.do(workshop.require):
            return
        made: str | None = await self._main.app.push_screen_wait(QuantizeScreen(workshop))
        if made is not None:
            await self.new()
            await self.pick_model(str(Path(made).absolute()))

    async def obey(self, opened: OpenSession, line: str) -> None:
        """A command of the session itself."""
        before = opened.copy()
        try:
            outcome = await asyncio.to_thread(opened.obey, line)
        except Stopped:
            self._tell("stopped")
            return
        except LocalgenError as error:
            self._tell(error.message, fault=True)
            return
        after = opened.copy()
        said = outcome.text if isinstance(outcome, commands.Say) else ""
        kept = len(before.conversation.turns)
        if after.conversation.turns[:kept] != before.conversation.turns:
            self._ways_back.append(lambda: self._put_back(opened, before, after))
            said = f"{said}; F9 brings back what was there"
        self._tell(said, title=one_line(line))
        self._main.show_settings()

    async def obey_own(self, name: str, argument: str) -> None:
        """One of the commands that only this program has, or has in its own way."""
        match name:
            case "/new":
                await self.new()
            case "/rename":
                await self.rename(self.opened.id, argument)
            case "/fork":
                await self.fork(self.opened.id, argument)
            case "/switch":
                await self.switch(argument)
            case "/delete":
                await self.delete(self.opened.id)
            case "/search":
                await self.search(argument)
            case "/export":
                await self.export(argument)
            case "/compare":
                await self.compare()
            case "/model":
                await self.pick_model(argument)
            case _:
                await self._main.app.run_action(_ACTIONS[name])

    async def _undelete(self, session: int) -> None:
        if await self.do(lambda: self._desk.restore(session)):
            await self.open(session)

    async def _put_back(self, opened: OpenSession, before: Kept, after: Kept) -> None:
        if await self.show(lambda: self._desk.put_back(opened, before, after)):
            self._tell("it is as it was")

    async def _look_up_models(self, opened: OpenSession) -> None:
        with contextlib.suppress(LocalgenError):  # a completion has no place to say so
            cards = await asyncio.to_thread(opened.session.client.models)
            self.models = [card.name for card in cards]

    def _name(self, session: int) -> str:
        return next((each.name for each in self._desk.listed if each.id == session), "")
