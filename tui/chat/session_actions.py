"""Session actions: confirmation by the user, then execution in threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import escape_name, one_line
from localgen.chat import commands, saved_chats
from localgen.chat.file_mentions import expand_mentions
from localgen.chat.session_store import SessionRecord
from localgen.tui.chat.active_session import UNNAMED_SESSION, ActiveSession, CommandStopped
from localgen.tui.chat.compare import (
    CompareDialog,
    CompareScreen,
    CompareVariant,
    require_known_model,
)
from localgen.tui.chat.main_screen import MainScreen
from localgen.tui.chat.model_picker import ModelPicker, SessionModelService
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.search import SearchScreen
from localgen.tui.chat.session_manager import SearchHit, SessionManager
from localgen.tui.chat.shell_command import ShellCommand, is_prompt
from localgen.tui.chat.text_dialog import TextInputDialog
from localgen.tui.chat.token_screen import NUM_ALTERNATIVES, TokenScreen
from localgen.tui.chat.transcript import Transcript
from localgen.tui.widgets.dialog import ConfirmDialog

if TYPE_CHECKING:
    from localgen.tui.quantize.runner import QuantizeRunner

ShowMessage = Callable[..., None]
_RETRY_S = 0.2
# commands that run the app action of a key
_KEY_ACTIONS = {
    "/regen": "regenerate",
    "/help": "keys",
    "/bye": "quit",
    "/quantize": "quantize",
    "/tokens": "tokens",
}


class SessionActions:
    """Actions on the sessions of the main screen. show_message: shows a message to the user."""

    def __init__(
        self, main_screen: MainScreen, manager: SessionManager, show_message: ShowMessage
    ) -> None:
        self.model_names: list[str] = []
        self._main_screen, self._manager, self._show_message = main_screen, manager, show_message
        self._undo_stack: list[Callable[[], Awaitable[object]]] = []
        self._opening_id: int | None = None  # the session that is being opened
        self._num_shows = 0
        self._shell_command: ShellCommand | None = None
        self._waiting_outputs: dict[int, list[str]] = {}  # by session
        self._put_outputs: dict[int, str] = {}  # by session, at the beginning of the prompt

    @property
    def current_session(self) -> ActiveSession:
        """The session on the screen. Actions that need one are disabled until it exists."""
        assert self._main_screen.current_session is not None
        return self._main_screen.current_session

    async def run_in_thread(self, work: Callable[[], object]) -> bool:
        """Run a function in a thread. Shows a LocalgenError and returns False."""
        try:
            await asyncio.to_thread(work)
        except LocalgenError as error:
            self._show_message(error.message, is_error=True)
            return False
        return True

    async def show_session(self, open_session: Callable[[], ActiveSession]) -> bool:
        """Open a session in a thread and show it.

        Returns False if that failed, or if another session was requested meanwhile.
        """
        self._main_screen.begin_switch()
        self._num_shows += 1
        number = self._num_shows
        try:
            opened = await asyncio.to_thread(open_session)
        except LocalgenError as error:
            self._show_message(error.message, is_error=True)
            if number == self._num_shows:
                self._main_screen.cancel_switch()
            return False
        if number != self._num_shows:
            return False
        self._main_screen.show_session(opened)
        return True

    async def open(self, session_id: int) -> None:
        self._main_screen.show_message("")
        self._opening_id = session_id
        await self.show_session(lambda: self._manager.get(session_id))
        if self._opening_id == session_id:
            self._opening_id = None

    async def new(self) -> None:
        if await self.show_session(self._manager.open_empty):
            self._main_screen.query_one(Prompt).focus()

    async def step(self, by: int) -> None:
        """Switch to the next (1) or previous (-1) session of the list."""
        ids = [listed.id for listed in self._manager.summaries]
        start = self.current_session.id if self._opening_id is None else self._opening_id
        if start in ids and len(ids) > 1:
            await self.open(ids[(ids.index(start) + by) % len(ids)])

    async def switch(self, name: str) -> None:
        """Switch to a session by name; without a name, focus the session list."""
        found = [listed for listed in self._manager.summaries if listed.name == name]
        if found:
            await self.open(found[0].id)
        elif name:
            self._show_message(f"no session {name}", is_error=True)
        else:
            self._main_screen.action_focus_sessions()

    async def rename(self, session_id: int, name: str = "") -> None:
        """Rename a session. Asks for the name if none is given."""
        if not name:
            question = TextInputDialog("New name of the session:", self._session_name(session_id))
            given: str | None = await self._main_screen.app.push_screen_wait(question)
            name = given or ""
        if name:
            await self.run_in_thread(lambda: self._manager.rename(session_id, name))
            self._main_screen.sync()

    async def fork(self, session_id: int, name: str = "") -> None:
        await self.show_session(lambda: self._manager.fork(self._manager.get(session_id), name))

    async def delete(self, session_id: int) -> None:
        """Delete a session after confirmation."""
        if (opened := self._manager.active_by_id.get(session_id)) is not None and opened.is_busy:
            self._show_message("it is in use: Ctrl+C stops the answer or command", is_error=True)
            return
        name = escape_name(self._session_name(session_id)) or UNNAMED_SESSION
        question = f"Delete “{name}”? F9 restores it until you quit."
        if not await self._main_screen.app.push_screen_wait(
            ConfirmDialog(question, yes="Delete", no="Keep")
        ):
            return
        before = [listed.id for listed in self._manager.summaries]
        if not await self.run_in_thread(lambda: self._manager.delete(session_id)):
            return
        self._undo_stack.append(lambda: self._restore_session(session_id))
        self._show_message("deleted; F9 restores it")
        if self.current_session.id == session_id:
            at = before.index(session_id) if session_id in before else 0
            rest = [listed.id for listed in self._manager.summaries]
            near = rest[min(at, len(rest) - 1)] if rest else None
            await self.show_session(
                lambda: self._manager.open_empty() if near is None else self._manager.get(near)
            )

    async def restore(self) -> None:
        """Undo the last deletion, of a session or of turns."""
        if not self._undo_stack:
            self._show_message("nothing to restore")
            return
        await self._undo_stack.pop()()

    async def export(self, path: str = "") -> None:
        """Export the current session. Asks for the path if none is given."""
        opened = self.current_session
        if not path:
            name = one_line(opened.name).replace("/", "-")
            question = TextInputDialog("Export to file (.md or .json):", f"{name}.md")
            given: str | None = await self._main_screen.app.push_screen_wait(question)
            path = given or ""
        if path and await self.run_in_thread(lambda: _export_transcript(opened, path)):
            place = Path(os.path.expanduser(path)).absolute()
            self._show_message(one_line(f"written to {place}"))

    async def search(self, text: str = "") -> None:
        hit: SearchHit | None = await self._main_screen.app.push_screen_wait(
            SearchScreen(self._manager.search, text)
        )
        if hit is None:
            return
        await self.open(hit.session_id)
        if hit.turn_index is not None:
            self._main_screen.query_one(Transcript).scroll_to_turn(hit.turn_index)

    async def pick_model(self, requested: str = "") -> None:
        """Load a model into the session, in the background. Asks for one if none is requested, or
        if it must be downloaded."""
        opened, name = self.current_session, requested or None
        models = SessionModelService(opened)
        if name is None or await asyncio.to_thread(models.can_pull, name):
            picker = ModelPicker(models, requested, opened.chat.requested_name)
            name = await self._main_screen.app.push_screen_wait(picker)
        if name is not None:
            await self._load_model(opened, name)
        await self._refresh_model_names(opened)

    async def require_model(self, opened: ActiveSession) -> bool:
        """Have the user choose if a remote server has several models and none is named.

        Returns False if none was chosen.
        """
        chat = opened.chat
        if not chat.is_remote or chat.requested_name:
            return True
        with contextlib.suppress(LocalgenError):  # the request reports it
            if len(await asyncio.to_thread(chat.client.models)) > 1:
                await self.pick_model()
                return bool(chat.requested_name)
        return True

    async def _load_model(self, opened: ActiveSession, name: str) -> None:
        try:
            await asyncio.to_thread(opened.load_model, name)
        except asyncio.CancelledError:  # the app is quitting and would wait for the thread
            opened.stop_command()
            raise
        except CommandStopped:
            self._show_message("stopped: the session keeps its model")
            return
        except LocalgenError as error:
            self._show_message(error.message, is_error=True)
            return
        info = opened.chat.model_info
        if info is not None:
            self._show_message("\n".join(map(one_line, (f"now using {name}", *info.notes))))
        self._main_screen.show_settings()

    async def compare(self) -> None:
        """Ask for the variants, then open the comparison."""
        opened = self.current_session
        session = opened.chat
        model = shlex.quote(session.requested_name) if session.requested_name else "MODEL"
        setup = CompareDialog(
            f"{model}\n{model} temperature=0\n",
            session.options.params,
            partial(require_known_model, session.client),
            is_remote=session.is_remote,
        )
        compared: list[CompareVariant] | None = await self._main_screen.app.push_screen_wait(setup)
        if compared is None:
            return
        try:
            made = await asyncio.to_thread(self._manager.compare, opened, compared)
        except LocalgenError as error:
            self._show_message(error.message, is_error=True)
            return
        columns = list(zip(made, (each.label for each in compared), strict=True))
        await self._main_screen.app.push_screen(CompareScreen(columns, self._show_message))

    async def explore_tokens(self) -> None:
        """Show the alternatives to each token of the last answer, and continue from one."""
        opened = self.current_session
        turns = opened.chat.conversation.turns
        if not turns or not turns[-1].answer:
            self._show_message("ask something first: its answer is looked at token by token")
            return
        at = len(turns) - 1
        look = partial(opened.next_tokens, at, count=NUM_ALTERNATIVES)
        screen = TokenScreen(turns[-1].answer, look)
        beginning: str | None = await self._main_screen.app.push_screen_wait(screen)
        if beginning is None:
            return
        last = turns[-1]
        if await self.show_session(lambda: self._manager.fork_before(opened, at)):
            forked = self.current_session
            await self.run_in_thread(
                lambda: forked.ask(last.prompt, beginning=beginning, steps=last.steps)
            )

    async def quantize(self, runner: QuantizeRunner) -> None:
        """Open the quantize screen; if the user chooses so, chat with its result afterwards."""
        if not await self.run_in_thread(runner.require_available):
            return
        from localgen.tui.quantize.screen import QuantizeScreen  # not at the start: 20 ms

        made: str | None = await self._main_screen.app.push_screen_wait(QuantizeScreen(runner))
        if made is not None:
            await self.new()
            await self.pick_model(str(Path(made).absolute()))

    async def run_command(self, active: ActiveSession, line: str) -> None:
        """Run a command of the session."""
        before = active.to_record()
        try:
            outcome = await asyncio.to_thread(active.run_command, line)
        except asyncio.CancelledError:  # the app is quitting and would wait for the thread
            active.stop_command()
            raise
        except CommandStopped:
            self._show_message("stopped")
            return
        except LocalgenError as error:
            self._show_message(error.message, is_error=True)
            return
        after = active.to_record()
        text = outcome.text if isinstance(outcome, commands.CommandOutput) else ""
        kept = len(before.conversation.turns)
        if after.conversation.turns[:kept] != before.conversation.turns:
            self._undo_stack.append(lambda: self._undo_command(active, before, after))
            text = f"{text}; F9 undoes it"
            if commands.asks_model(line):  # a summary is no deletion that was asked for
                await self.run_in_thread(lambda: self._manager.keep_copy(active, before))
                text += ", and the whole conversation stays below this one"
        self._show_message(text, title=one_line(line))
        self._main_screen.show_settings()

    async def ask(self, active: ActiveSession, typed: str) -> bool:
        """Send a prompt with the files that it mentions; shows an error and returns False."""
        try:
            prompt = await asyncio.to_thread(expand_mentions, typed)
        except InvalidRequest as error:
            self._show_message(error.message, is_error=True)
            return False
        if prompt.notices:
            self._show_message("\n".join(map(one_line, prompt.notices)))
        return await self.run_in_thread(lambda: active.ask(prompt.text))

    async def run_shell(self, line: str) -> None:
        """Run a line of the shell, and put its output into the prompt of the session."""
        opened, command = self.current_session, line.removeprefix("!").strip()
        if not command:
            self._show_message("give a command after !, such as !git diff", is_error=True)
            return
        if self._shell_command is not None:
            message = f"!{self._shell_command.command} is still running: Ctrl+C stops it"
            self._show_message(message, is_error=True)
            self._main_screen.put_before(opened, line)
            return
        self._shell_command = ShellCommand(command)
        self._main_screen.set_running_shell_line(line)
        self._show_message(f"{one_line(line)} is running; Ctrl+C stops it")
        try:
            output = await self._shell_command.run()
        except InvalidRequest as error:
            self._show_message(error.message, is_error=True)
            return
        finally:
            self._shell_command = None
            self._main_screen.set_running_shell_line("")
        self._main_screen.show_message("")
        waiting = self._waiting_outputs.setdefault(opened.id, [])
        waiting.append(output + "\n")
        if len(waiting) == 1:  # else the first one, which waits, takes this one along
            await self._until_not_a_command(opened, line)
            self.put_waiting_output(opened)

    def put_waiting_output(self, opened: ActiveSession) -> None:
        """Put the output of the shell into the prompt, whatever is there."""
        if outputs := self._waiting_outputs.pop(opened.id, []):
            earlier = self._put_outputs.get(opened.id, "")
            put = self._main_screen.put_before(opened, "".join(outputs), after=earlier)
            self._put_outputs[opened.id] = put

    async def _until_not_a_command(self, opened: ActiveSession, line: str) -> None:
        """Wait until the prompt has no unfinished command, which text before it would change."""
        if not is_prompt(self._main_screen.typed_text(opened)):
            self._show_message(
                f"{one_line(line)} is done: send or clear the command, and its output comes here"
            )
            while not is_prompt(self._main_screen.typed_text(opened)):
                await asyncio.sleep(_RETRY_S)
            self._show_message("")

    def stop_shell(self) -> bool:
        """Stop the line of the shell that is running; False if there is none."""
        if self._shell_command is None:
            return False
        self._shell_command.stop()
        return True

    async def run_screen_command(self, name: str, argument: str) -> None:
        """Run a command of the screen."""
        match name:
            case "/new":
                await self.new()
            case "/rename":
                await self.rename(self.current_session.id, argument)
            case "/fork":
                await self.fork(self.current_session.id, argument)
            case "/switch":
                await self.switch(argument)
            case "/delete":
                await self.delete(self.current_session.id)
            case "/search":
                await self.search(argument)
            case "/export":
                await self.export(argument)
            case "/compare":
                await self.compare()
            case "/model":
                await self.pick_model(argument)
            case _:
                await self._main_screen.app.run_action(_KEY_ACTIONS[name])

    async def _restore_session(self, session_id: int) -> None:
        if await self.run_in_thread(lambda: self._manager.restore(session_id)):
            await self.open(session_id)

    async def _undo_command(
        self, active: ActiveSession, before: SessionRecord, after: SessionRecord
    ) -> None:
        if await self.show_session(lambda: self._manager.undo_command(active, before, after)):
            self._show_message("undone")

    async def _refresh_model_names(self, active: ActiveSession) -> None:
        with contextlib.suppress(LocalgenError):  # completion has no place for errors
            cards = await asyncio.to_thread(active.chat.client.models)
            self.model_names = [card.name for card in cards]

    def _session_name(self, session_id: int) -> str:
        return next((each.name for each in self._manager.summaries if each.id == session_id), "")


def _export_transcript(active: ActiveSession, target: str) -> Path:
    """Write the session to a path: JSON for `/load` if it ends in .json, else Markdown.

    Returns the absolute path. Raises InvalidRequest if it cannot be written, or if it is an
    existing file other than a saved chat.
    """
    from localgen.chat.transcript import transcript_markdown  # not at the start

    path = Path(os.path.expanduser(target))
    session = active.chat
    if path.suffix == ".json":
        saved_chats.save_chat(
            path, saved_chats.SavedChat(session.name, session.options.params, session.conversation)
        )
        return path.absolute()
    try:
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(transcript_markdown(active.name, session.conversation))
    except FileExistsError as error:
        raise InvalidRequest(f"{path} already exists: give another name") from error
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error
    return path.absolute()
