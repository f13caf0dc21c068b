"""The loop of a chat: read a line, obey or ask, keep what was said."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text as Styled

from localgen.backends.errors import EngineDied, LocalgenError, ServerUnavailable
from localgen.backends.terminal_text import inert, one_line
from localgen.chat import commands, report
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import FIRST_BRANCH, Session
from localgen.client import Answer, Text
from localgen.config import Settings
from localgen.repl.live_answer import LiveAnswer
from localgen.repl.load_progress import Loading
from localgen.repl.prompt import unquoted

if TYPE_CHECKING:
    from localgen.client import ModelClient


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one prompt. answer: None where Ctrl+C stopped it; speed: seen so far.

    reasoning: what the model thought before.
    """

    text: str
    reasoning: str
    answer: Answer | None
    speed: str


class Repl:
    """A session, the console it is shown on, and where its lines come from.

    read: the next line for a given prompt; raises EOFError to leave, KeyboardInterrupt at Ctrl+C.
    """

    def __init__(self, session: Session, console: Console, read: Callable[[str], str]) -> None:
        self.session = session
        self.console = console
        self.read = read

    def run(self) -> None:
        """Until the user leaves."""
        self._greet()
        while True:
            try:
                line = self.read(self._prompt())
            except KeyboardInterrupt:
                self._dim("Ctrl+D or /bye leaves")
                continue
            except EOFError:
                return
            if line.strip() and not self.handle(line):
                return

    def handle(self, line: str) -> bool:
        """Obey a command or answer a prompt; False: leave. Errors are told, and change nothing."""
        try:
            if commands.is_command(line):
                return self._obey(line)
            self._ask(unquoted(line))
        except LocalgenError as error:
            self._tell(one_line(error.message), "red")
        except KeyboardInterrupt:
            self._tell("stopped", "yellow")
        return True

    def _obey(self, line: str) -> bool:
        before = self.session.conversation
        with Loading(self.console, line.partition(" ")[2]) as loading:
            outcome = commands.run(self.session, line, loading.progress)
        match outcome:
            case commands.Say(text):
                self._dim(text)
            case commands.Ask(prompt):
                self._ask_again(prompt, before)
            case commands.Leave():
                return False
        return True

    def _ask_again(self, prompt: str, before: Conversation) -> None:
        same = self.session.why_same_again()
        if same is not None:
            self._tell(f"{same}, so the answer will be the same", "yellow")
        kept = False
        try:
            kept = self._ask(prompt)
        finally:
            if not kept:
                self.session.change(before)

    def _ask(self, prompt: str) -> bool:
        """Answer a prompt; whether there is a new turn."""
        self._ensure_loaded()
        try:
            reply = self._stream(prompt)
        except (ServerUnavailable, EngineDied) as gone:
            self._dim(f"{one_line(gone.message)}; starting it again and asking again")
            self._ensure_loaded()
            reply = self._stream(prompt)
        if not (reply.text or reply.reasoning) and reply.answer is None:
            self._tell("stopped", "yellow")
            return False
        turn = Turn(prompt, reply.text, reply.answer is None, reply.reasoning)
        self.session.answered(turn, reply.answer)
        self._report(reply)
        return True

    def _stream(self, prompt: str) -> Reply:
        pieces: list[str] = []
        thoughts: list[str] = []
        stream = self.session.stream(prompt)
        used = self.session.used_tokens() + len(prompt) // 4
        shown = LiveAnswer(self.console, used=used, limit=self.session.ctx)
        try:
            with shown, closing(stream):
                for event in stream:
                    match event:
                        case Text(text, tokens, reasoning):
                            pieces.append(text)
                            thoughts.append(reasoning)
                            shown.feed(text, tokens, reasoning, estimated=event.estimated)
                        case Answer():
                            return Reply("".join(pieces), "".join(thoughts), event, shown.speed())
        except KeyboardInterrupt:
            return Reply("".join(pieces), "".join(thoughts), None, shown.speed())
        raise ServerUnavailable("the answer broke off")

    def _ensure_loaded(self) -> None:
        with Loading(self.console, self.session.model.name) as loading:
            self.session.ensure_loaded(loading.progress)

    def _report(self, reply: Reply) -> None:
        if reply.answer is None:
            self._tell("stopped", "yellow")
            self._dim(reply.speed + "\n")
            return
        for warning in report.warnings(reply.answer):
            self._tell(one_line(warning), "yellow")
        self._dim(report.answer_line(reply.answer))
        if self.session.options.verbose:
            load_ms = self.session.model.load_ms
            self._dim("\n".join(report.verbose_lines(reply.answer, load_ms)))
        self.console.print()

    def _greet(self) -> None:
        self._dim(report.model_line(self.session.model))
        for note in self.session.model.notes:
            self._dim(f"note: {note}")
        self._dim("/help lists the commands, Ctrl+D leaves")

    def _prompt(self) -> str:
        branch = self.session.branch
        return ">>> " if branch == FIRST_BRANCH else f"{inert(branch)} >>> "

    def _dim(self, text: str) -> None:
        self._tell(inert(text), "dim")

    def _tell(self, text: str, style: str) -> None:
        self.console.print(Styled(text, style=style), soft_wrap=False)


def start_chat(
    client: ModelClient, loading: Loading, model: str | None, options: ModelOptions
) -> None:
    """Load the model, then chat on the console of `loading` until the user leaves.

    LocalgenError: the model cannot be loaded.
    """
    # the editor takes as long to import as the model to load: do both at once
    editor = threading.Thread(target=importlib.import_module, args=(f"{__package__}.prompt",))
    editor.start()
    settings = Settings.from_environment()
    settings.prepare_state()
    session = Session(client, settings.state_dir, options)
    with loading:
        client.connect()
        session.load(model, loading.progress)
    editor.join()
    Repl(session, loading.console, _line_editor(session)).run()


def _line_editor(session: Session) -> Callable[[str], str]:
    from localgen.chat import saved_chats
    from localgen.repl.prompt import Completions, prompt_session

    # a completion is asked for at every key, and looking at a large cache takes a while
    @functools.cache
    def models() -> list[str]:
        try:
            return [card.name for card in session.client.models()]
        except LocalgenError:
            return []  # a completion has no place to say that the server is away

    completions = Completions(lambda: saved_chats.names(session.state_dir), models)
    editor = prompt_session(session.state_dir / "chat_history", completions)

    def read(prompt: str) -> str:
        models.cache_clear()
        return editor.prompt(prompt)

    return read
