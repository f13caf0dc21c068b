"""An open session: its stored record, its model, and the answer being generated."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.chat import commands, settings
from localgen.chat.conversation import ToolStep, Turn
from localgen.chat.session import ChatSession
from localgen.chat.session_recorder import create_copy, title_from_prompt
from localgen.chat.session_store import SessionBusy, SessionChanged, SessionRecord
from localgen.client import Client
from localgen.client.responses import TokenAlternative
from localgen.mcp_tools.call_question import CallQuestion, Decision
from localgen.tui.chat.answer_stream import AnswerStream
from localgen.tui.chat.app_context import AppContext

UNNAMED_SESSION = "New session"
# setting names that are not sampling parameters
SYSTEM_SETTING, CTX_SETTING = "system", "ctx"
# commands that change the stored record
_MUTATING_COMMANDS = ("/set", "/load", "/clear", "/undo", "/compact")


class CommandStopped(Exception):
    """The user has stopped the command."""


class ActiveSession:
    """An open session. Methods may be called from any thread; requests and store access block.

    save_error: why the last save failed; the session stays in memory. unsent_prompt: typed text.
    running_command: the command in progress; load_progress: fraction of its model loaded.
    client_message: the client's last notice since the current request began. messages: notices
    waiting to be shown to the user. queued_prompts: to be sent when the session is idle again.
    """

    def __init__(self, record: SessionRecord, context: AppContext) -> None:
        self.record = record
        self.answer_stream: AnswerStream | None = None
        self.last_stream: AnswerStream | None = None
        self.save_error = ""
        self.running_command = ""
        self.load_progress: float | None = None
        self.client_message = ""
        self.messages: deque[str] = deque()
        self.queued_prompts: deque[str] = deque()
        self.unsent_prompt = context.store.load_unsent_prompt(record.id)
        self._saved_unsent_prompt = self.unsent_prompt
        self._context = context
        self._lock = threading.RLock()
        self._is_turn_begun = self._is_stopping = False
        self._ended_turn: Turn | None = None
        self._is_other_server = False
        tools = context.tools.for_another_chat()
        self.chat = ChatSession(self._new_client(), context.state_dir, context.options, tools)
        self._apply_record(record)

    @property
    def id(self) -> int:
        return self.record.id

    @property
    def name(self) -> str:
        return self.record.name or UNNAMED_SESSION

    @property
    def is_answering(self) -> bool:
        answering = self.answer_stream  # read once: another thread may reset it
        return answering is not None and not answering.ended.is_set()

    @property
    def is_busy(self) -> bool:
        """True if a prompt would be refused for now: an answer or a command is in progress."""
        return self.answer_stream is not None or bool(self.running_command)

    @property
    def can_stop(self) -> bool:
        """True if an answer or a command is in progress."""
        return self.is_answering or bool(self.running_command)

    def ask(self, prompt: str, *, beginning: str = "", steps: tuple[ToolStep, ...] = ()) -> None:
        """Start an answer, or continue its beginning, with the steps before that.

        Raises SessionChanged, SessionBusy or SessionGone if it may not.
        """
        with self._lock:
            self._require_idle()
            self._start_answer(prompt, beginning=beginning, steps=steps)

    def next_tokens(
        self, turn_index: int, beginning: str, count: int
    ) -> tuple[TokenAlternative, ...]:
        """See ChatSession.next_tokens()."""
        with self._command_running("looking at tokens"):
            self.chat.ensure_loaded(self._on_load_progress)
            return self.chat.next_tokens(turn_index, beginning, count)

    def regenerate(self) -> None:
        """Answer the last prompt again; a partial new answer does not replace the old one."""
        with self._lock:
            self._require_idle()
            self._start_answer(self.chat.require_regenerable().prompt, regenerate=True)

    def stop(self) -> bool:
        """Stop the answer or command in progress, without waiting; False if there was none."""
        answering = self.answer_stream
        if answering is not None and not answering.ended.is_set():
            answering.stop()
            return True
        return self.stop_command()

    @property
    def question(self) -> CallQuestion | None:
        """The tool call that waits for the user."""
        answering = self.answer_stream
        return None if answering is None else answering.question

    def answer_question(self, question: CallQuestion, decision: Decision) -> bool:
        """Answer a question about a tool call; False if it is not asked any more."""
        answering = self.answer_stream
        return answering is not None and answering.answer_question(question, decision)

    def answer_now(self) -> None:
        """End the reasoning of the answer in progress. Raises InvalidRequest if there is none."""
        answering = self.answer_stream
        if answering is None or not answering.is_reasoning:
            raise InvalidRequest("the model does not reason now: there is nothing to end")
        self.chat.client.answer_now()

    def stop_command(self) -> bool:
        """Stop the command in progress, without waiting; False if there was none."""
        if not self.running_command:
            return False
        self._is_stopping = True
        self.chat.client.abort()
        self.chat.tools.stop_start()
        return True

    def finalize_answer(self) -> None:
        """Add the answer that has ended to the conversation, and save."""
        with self._lock:
            done = self.answer_stream
            if done is None or not done.ended.is_set():
                return
            self._record_turn(done)
            self.answer_stream = None
            self._is_stopping = done.is_stopping
            self._renew_client()
            self.save()

    def run_command(self, line: str) -> commands.CommandResult:
        """Run a slash command shared with the terminal chat."""
        with self._command_running(line):
            if line.split()[0] in _MUTATING_COMMANDS:
                self._require_not_generating()
            if commands.needs_model(line):
                self.chat.ensure_loaded(self._on_load_progress)
            outcome = commands.run_command(self.chat, line, self._on_load_progress)
        self.last_stream = None  # its error may be mended
        return outcome

    def apply_setting(self, setting: str, text: str) -> None:
        """Set SYSTEM_SETTING, CTX_SETTING or a sampling parameter, effective from the next prompt.

        text: the value; empty resets to the model's default. Raises InvalidRequest if it is
        invalid.
        """
        with self._lock:
            self._require_not_generating()
            if setting == SYSTEM_SETTING:
                self._require_no_command()
                self.chat.set_conversation(self.chat.conversation.with_system(text))
            elif setting == CTX_SETTING:
                settings.set_ctx(self.chat, text or "default")
            else:
                self.chat.set_parameter(setting, text or "default")
            if self.answer_stream is None:
                self.last_stream = None  # its error may be mended
            self.save()

    def load_model(self, name: str | None) -> None:
        """Load a model and switch to it; on an error the session keeps its model."""
        with self._command_running(f"/model {name or ''}"):
            self._require_not_generating()
            self.chat.client.connect()
            self.chat.load(name, self._on_load_progress)
            self._is_other_server = False

    def rename(self, name: str) -> None:
        with self._lock:
            self._context.store.rename(self.id, name)
            self.record = replace(self.record, name=name)

    def undo_command(self, before: SessionRecord, after: SessionRecord) -> bool:
        """Revert a command's changes. Returns False if the conversation has changed since."""
        with self._lock:
            self._require_idle()
            if self.chat.conversation != after.conversation:
                return False
            self.chat.set_conversation(before.conversation)
            self.chat.set_options(params=before.params)
            self.save()
            return True

    def save(self) -> None:
        """Save unsaved changes; on failure sets `save_error`."""
        with self._lock:
            try:
                self._save()
                self.save_error = ""
            except LocalgenError as error:
                self.save_error = error.message

    def refresh(self) -> bool:
        """Load changes made by another process. Returns whether there were any."""
        with self._lock:
            if self.answer_stream is not None or self.running_command or self.save_error:
                return False
            fresh = self._context.store.read(self.id)
            if fresh == self.record:
                return False
            if fresh.revision != self.record.revision:
                self._apply_record(fresh)
            self.record = fresh
            return True

    def to_record(self) -> SessionRecord:
        """The current state as a record."""
        options, model, server = (
            self.chat.options,
            self.chat.requested_model,
            self._context.server_url,
        )
        if self._is_other_server:  # not used with this server: keep its own
            model, server = self.record.model, self.record.server_url
        return replace(
            self.record,
            model=model,
            server_url=server,
            params=options.params,
            ctx=options.ctx,
            conversation=self.chat.conversation,
        )

    def close(self) -> None:
        """Save and close the client; a running answer is stopped and its partial text saved."""
        answering = self.answer_stream
        self.stop()
        if answering is not None:
            answering.ended.wait(2.0)
            self.finalize_answer()
        self.save()
        self.chat.client.close()

    @contextlib.contextmanager
    def _command_running(self, command: str) -> Iterator[None]:
        """Mark a command as running. Raises CommandStopped if the user stops it."""
        with self._lock:
            self._require_idle()
            self.running_command, self.client_message = command, ""
        try:
            yield
        except LocalgenError as error:
            if self._is_stopping:
                raise CommandStopped("stopped") from error
            raise
        finally:
            with self._lock:
                self.running_command, self.load_progress = "", None
                self._renew_client()
                self.save()

    def _on_load_progress(self, fraction: float) -> None:
        self.load_progress = fraction

    def _start_answer(
        self,
        prompt: str,
        *,
        regenerate: bool = False,
        beginning: str = "",
        steps: tuple[ToolStep, ...] = (),
    ) -> None:
        self._is_other_server, self.client_message = False, ""
        self._begin_turn(prompt)
        answering = AnswerStream(
            *(self.chat, prompt, self._context.clock),
            regenerate=regenerate,
            beginning=beginning,
            steps=steps,
        )
        self.last_stream = self.answer_stream = answering
        answering.start()

    def _begin_turn(self, prompt: str) -> None:
        name = self.record.name or title_from_prompt(prompt)
        wanted = replace(self.to_record(), name=name, model=self.chat.stored_name)
        self._ended_turn = None
        try:
            self.record = self._context.store.begin_turn(wanted, prompt)
            self._is_turn_begun, self.save_error = True, ""
        except InvalidRequest:  # changed or in use by another process
            raise
        except LocalgenError as error:  # answer even if the disk is full
            self.record = replace(self.record, name=wanted.name)
            self._is_turn_begun, self.save_error = False, error.message
        # it stays the session's model when the default is another one
        self.chat.requested_model = wanted.model

    def _record_turn(self, stream: AnswerStream) -> None:
        turn = self._ended_turn = stream.to_turn()
        add = self.chat.add_regenerated if stream.is_regeneration else self.chat.add_turn
        add(turn, stream.completion, stream.used_tokens)

    def _save(self) -> None:
        store = self._context.store
        if self.unsent_prompt != self._saved_unsent_prompt:
            store.save_unsent_prompt(self.id, self.unsent_prompt)
            self._saved_unsent_prompt = self.unsent_prompt
        if self.answer_stream is not None:
            if self._is_turn_begun:
                store.update_turn(self.record, self.answer_stream.to_turn())
            return
        if self._is_turn_begun and self._ended_turn is not None:
            self.record = store.finish_turn(self.record, self._ended_turn)
            self._is_turn_begun = False
        now = self.to_record()
        if now != self.record:
            try:
                self.record = store.update(now)
            except SessionChanged:
                self._fork_on_conflict(now)

    def _fork_on_conflict(self, record: SessionRecord) -> None:
        """Save as a new session: another process has changed this one, and both are kept."""
        theirs, name = self.id, self.name
        self.record = create_copy(self._context.store, replace(record, name=name))
        self.messages.append(
            f"another localgen has changed {name!r}: your version continues as {self.name!r}"
        )
        self._saved_unsent_prompt = ""
        with contextlib.suppress(LocalgenError):  # on failure both sessions have the text
            self._context.store.save_unsent_prompt(theirs, "")

    def _apply_record(self, record: SessionRecord) -> None:
        """Set the chat to a record's state."""
        self._is_other_server = record.server_url != self._context.server_url
        model = self._context.model if self._is_other_server else record.model
        self.chat.set_conversation(record.conversation)
        self.chat.set_options(
            params=record.params, ctx=record.ctx, system=record.conversation.system
        )
        if model != self.chat.requested_model:
            self.chat.model_info, self.chat.requested_model = None, model

    def _new_client(self) -> Client:
        return self._context.make_client(self._on_client_message)

    def _on_client_message(self, line: str) -> None:
        self.client_message = line
        self.messages.append(line)

    def _renew_client(self) -> None:
        """Replace the client after a stop: an aborted client accepts no further requests."""
        if self._is_stopping:
            self._is_stopping = False
            self.chat.client.close()
            self.chat.client = self._new_client()

    def _require_idle(self) -> None:
        if self.answer_stream is not None:
            raise InvalidRequest("an answer is being written: Ctrl+C stops it")
        self._require_no_command()
        self._renew_client()

    def _require_no_command(self) -> None:
        if self.running_command:
            raise InvalidRequest(f"{self.running_command} is still running")

    def _require_not_generating(self) -> None:
        if self.record.unfinished_turn is not None:
            raise SessionBusy("another localgen tui is answering here: wait for it")
