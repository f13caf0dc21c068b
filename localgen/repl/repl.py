"""The read-eval-print loop of a chat: run commands, stream answers, keep the conversation."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from localgen.backends.errors import EngineDied, LocalgenError, ServerUnavailable
from localgen.backends.terminal_text import collapse, escape_control_chars, one_line
from localgen.backends.units import format_count
from localgen.chat import commands, report
from localgen.chat.conversation import ToolStep, Turn
from localgen.chat.file_mentions import expand_mentions
from localgen.chat.session import DEFAULT_BRANCH, ChatSession
from localgen.client import Completion, TextDelta
from localgen.machine.busy_processes import busy_programs
from localgen.mcp_tools.call_arguments import call_line
from localgen.mcp_tools.chat_tools import MAX_ROUNDS, ROUNDS_NOTICE, runnable_calls
from localgen.repl.answer_key import ANSWER_NOW_KEY, has_answer_key, on_answer_now
from localgen.repl.live_answer import LiveAnswer
from localgen.repl.load_progress import LoadProgressLine
from localgen.repl.tool_calls import ToolCallPrinter
from localgen.repl.typed_ahead import discard_typed_ahead

if TYPE_CHECKING:
    from localgen.chat.session_recorder import SessionRecorder
    from localgen.chat.session_store import SessionRecord
    from localgen.client.snapshot import ModelSnapshot

# the last exchange of a continued chat is a reminder
_EXCERPT_CHARS = 200


@dataclass(frozen=True, slots=True)
class ReplAnswer:
    """The answer to one prompt.

    completion: None if it was stopped. figures: as measured by the client. error: what stopped it,
    or None for Ctrl+C.
    """

    text: str
    reasoning: str
    completion: Completion | None
    figures: report.LiveFigures
    error: LocalgenError | None = None


class Repl:
    """The chat loop of a session on a console.

    read_line: reads the next line with the given prompt; raises EOFError to leave and
    KeyboardInterrupt at Ctrl+C. recorder: stores the conversation, or None if it is not stored,
    because of storage_failure if there is one. notices: where the client's notices go, shown below
    an answer while it streams. ask: reads an answer to a question, as read_line, but never keys
    that were typed before it; by default read_line. keep: gets a line that is no answer to it, for
    the next read_line.
    """

    def __init__(
        self,
        session: ChatSession,
        console: Console,
        read_line: Callable[[str], str],
        recorder: SessionRecorder | None = None,
        notices: LoadProgressLine | None = None,
        storage_failure: str = "",
        ask: Callable[[str], str] | None = None,
        keep: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.session = session
        self.console = console
        self.read_line = read_line
        self.recorder, self.storage_failure = recorder, storage_failure
        self._calls = ToolCallPrinter(console, ask or read_line, keep)
        self.notices = notices or LoadProgressLine(console, "")
        # by model: tokens per second of the latest answer that had all cores
        self._full_rates: dict[str, float] = {}

    def run(self) -> None:
        """Read and handle lines until the user leaves."""
        self._greet()
        while True:
            try:
                line = self.read_line(self._prompt())
            except KeyboardInterrupt:
                self._print_dim("Ctrl+D or /bye leaves")
                continue
            except EOFError:
                break
            if line.strip() and not self.handle_line(line):
                break
        self._save()
        self._print_farewell()

    def handle_line(self, line: str) -> bool:
        """Run a command or answer a prompt, and store what changed. Returns False to leave.

        Errors are printed and leave the session unchanged.
        """
        is_staying = self._handle_line(line)
        # a second Ctrl+C must not end the chat; the next line, or leaving, saves again
        with contextlib.suppress(KeyboardInterrupt):
            self._save()
        return is_staying

    def _handle_line(self, line: str) -> bool:
        from localgen.repl.prompt import strip_quotes

        try:
            if commands.is_command(line):
                return self._run_command(line)
            self._ask(self._with_files(strip_quotes(line)))
        except LocalgenError as error:
            self._print(one_line(error.message), "red")
        except KeyboardInterrupt:
            discard_typed_ahead()
            self._print("stopped", "yellow")
        return True

    def _with_files(self, prompt: str) -> str:
        """The prompt with the text of the files that it mentions."""
        expanded = expand_mentions(prompt)
        for notice in expanded.notices:
            self._print_dim(notice)
        return expanded.text

    def _run_command(self, line: str) -> bool:
        if commands.asks_model(line):
            self._ensure_loaded()
            self.session.require_answered()
            self._print_dim("the model answers this command; Ctrl+C stops it")
        if server := commands.server_to_start(line):
            self._print_dim(f"starting MCP server {one_line(server)}; Ctrl+C stops it")
        with LoadProgressLine(self.console, line.partition(" ")[2]) as loading:
            outcome = commands.run_command(self.session, line, loading.update)
        match outcome:
            case commands.CommandOutput(text, is_new):
                self._print(escape_control_chars(text), "dim")
                if is_new:
                    self._start_new()
            case commands.Regenerate(prompt):
                self._regenerate(prompt)
            case commands.LeaveChat():
                return False
        return True

    def _save(self) -> None:
        if self.recorder is None:
            return
        with _ignore_ctrl_c():
            notice = self.recorder.save()
        if notice:
            self._print(one_line(notice), "yellow")

    def _start_new(self) -> None:
        """Leave the stored conversation as it is; the next turn begins another."""
        if self.recorder is None:
            return
        if self.recorder.is_stored:
            self._print_dim(f"{self.recorder.record.name!r} stays stored")
        self.recorder.start_new()

    def _regenerate(self, prompt: str) -> None:
        notice = self.session.repeat_notice()
        if notice is not None:
            self._print(notice, "yellow")
        num_turns = len(self.session.conversation.turns)
        self._ask(prompt, regenerate=True)
        if len(self.session.conversation.turns) > num_turns:
            self._print_dim("the answer before is kept: /undo removes the stopped one")

    def _ask(self, prompt: str, *, regenerate: bool = False) -> None:
        """Answer a prompt, or that of the last turn again if `regenerate`."""
        self._ensure_loaded()
        steps: tuple[ToolStep, ...] = ()
        reply = self._stream_again(prompt, steps, regenerate=regenerate)
        while reply.completion is not None and (
            calls := runnable_calls(reply.completion, len(steps))
        ):
            results = self._calls.run(self.session, calls)
            steps = (*steps, ToolStep(reply.text, reply.reasoning, calls, results.texts))
            if results.was_stopped:
                reply = replace(reply, text="", reasoning="", completion=None)
                break
            if len(steps) == MAX_ROUNDS:
                self._print(ROUNDS_NOTICE, "yellow")
            reply = self._stream_again(prompt, steps, regenerate=regenerate)
        if not (reply.text or reply.reasoning or steps) and reply.completion is None:
            if reply.error is not None:
                raise reply.error
            self._print("stopped", "yellow")
            return
        add = self.session.add_regenerated if regenerate else self.session.add_turn
        turn = replace(self._to_turn(prompt, reply), steps=steps)
        add(turn, reply.completion, reply.figures.exact_context)
        self._print_stats(reply)

    def _stream_again(
        self, prompt: str, steps: tuple[ToolStep, ...], *, regenerate: bool
    ) -> ReplAnswer:
        """Stream a part of an answer; once more if the server or the engine is gone."""
        reply = self._stream(prompt, steps, regenerate=regenerate)
        if isinstance(reply.error, ServerUnavailable | EngineDied):
            self._print_dim(f"{reply.error.message}; restarting it and sending the prompt again")
            try:
                self._ensure_loaded()
                reply = self._stream(prompt, steps, regenerate=regenerate)
            except LocalgenError as error:
                reply = replace(reply, error=error)
        return reply

    def _to_turn(self, prompt: str, reply: ReplAnswer) -> Turn:
        session = self.session
        if reply.completion is not None:
            summary = report.answer_summary(reply.completion, session.options, session.model_info)
        else:
            summary = f"interrupted: {reply.error.message}" if reply.error else "stopped"
        return Turn(prompt, reply.text, reply.completion is None, reply.reasoning, summary)

    def _stream(self, prompt: str, steps: tuple[ToolStep, ...], *, regenerate: bool) -> ReplAnswer:
        pieces: list[str] = []
        thoughts: list[str] = []
        stream = self.session.stream(prompt, regenerate=regenerate, steps=steps)
        used = self.session.estimate_used_tokens() + len(prompt) // 4
        shown = LiveAnswer(
            self.console,
            used_tokens=used,
            max_context=self.session.ctx,
            shows_figures=self.session.options.figures,
            reasoning_hint=self._reasoning_hint(),
            prompt_progress=lambda: self.session.client.prompt_progress,
        )
        try:
            with shown, self._notices_to(shown), closing(stream):
                for event in stream:
                    match event:
                        case TextDelta(text, tokens, reasoning, estimated, prompt_tokens):
                            pieces.append(text)
                            thoughts.append(reasoning)
                            shown.feed(
                                *(text, tokens, reasoning),
                                estimated=estimated,
                                prompt_tokens=prompt_tokens,
                            )
                        case Completion():
                            return ReplAnswer(
                                "".join(pieces), "".join(thoughts), event, shown.figures()
                            )
            error: LocalgenError | None = ServerUnavailable("the answer was interrupted")
        except KeyboardInterrupt:
            error = None
            discard_typed_ahead()
        except LocalgenError as failure:
            error = failure
        return ReplAnswer("".join(pieces), "".join(thoughts), None, shown.figures(), error)

    def _reasoning_hint(self) -> str:
        """The key that ends the reasoning; empty if the server or the terminal has none."""
        can = self.session.client.is_localgen and has_answer_key()
        return f"{ANSWER_NOW_KEY} answers now" if can else ""

    @contextlib.contextmanager
    def _notices_to(self, shown: LiveAnswer) -> Iterator[None]:
        """Show notices below the answer. The key that ends its reasoning is active meanwhile."""

        def answer_now() -> None:
            try:
                self.session.client.answer_now()
            except LocalgenError as error:
                shown.show_notice(error.message)

        with self.notices.notices_to(shown.show_notice), on_answer_now(answer_now):
            yield

    def _ensure_loaded(self) -> None:
        with LoadProgressLine(self.console, self.session.model.name) as loading:
            self.session.ensure_loaded(loading.update)

    def _print_stats(self, answer: ReplAnswer) -> None:
        if answer.completion is None:
            if answer.error is not None:
                self._print(one_line(answer.error.message), "red")
            remedy = "interrupted: /regen sends the prompt again"
            self._print("stopped" if answer.error is None else remedy, "yellow")
            if self.session.options.figures:
                self._print_dim(report.stopped_line(answer.figures))
            if self.session.options.verbose:
                self._print_dim(report.live_stats_line(answer.figures))
            self.console.print()
            return
        for warning in report.completion_warnings(answer.completion):
            self._print(one_line(warning), "yellow")
        if self.session.options.figures:
            parts = (report.completion_line(answer.completion), self._busy_cores(answer.completion))
            self._print_dim(" · ".join(part for part in parts if part))
        if self.session.options.verbose:
            load_ms = self.session.model.load_ms
            lines = report.verbose_stats_lines(answer.completion, load_ms)
            for line in lines:
                self._print_dim(line)
        self.console.print()

    def _busy_cores(self, completion: Completion) -> str:
        """Programs that used cores during the model's last steps; empty if it had all cores."""
        found = self._local_snapshot()
        if found is None:
            return ""
        rate = completion.timings.predicted_per_second
        if not found.lacks_cores:
            self._full_rates[found.name] = rate
            return ""
        return report.busy_cores(found, busy_programs(), rate, self._full_rates.get(found.name, 0))

    def _local_snapshot(self) -> ModelSnapshot | None:
        """The state of a model on this machine."""
        if self.session.client.url:
            return None
        try:
            return next(iter(self.session.model_snapshots()), None)
        except LocalgenError:
            return None

    def _greet(self) -> None:
        found = self._local_snapshot()
        memory_bytes = found.memory_bytes if found is not None else None
        model = replace(self.session.model, ctx=self.session.ctx or 0)
        self._print_dim(report.greeting_line(model, memory_bytes))
        for note in self.session.model.notes:
            self._print_dim(f"note: {note}")
        for line in report.tool_lines(self.session.tools):
            self._print_dim(line)
        self._print_dim("/help lists the commands, Ctrl+D leaves")
        if self.recorder is not None and self.recorder.record.name:
            self._introduce(self.recorder.record)

    def _introduce(self, record: SessionRecord) -> None:
        """Print what is continued, with the last exchange, or the name of a new session."""
        turns = record.conversation.turns
        name = record.name
        if not turns:
            self._print_dim(f"new session {name!r}")
            return
        self._print_dim(f"continued: {name!r} · {format_count(len(turns), 'turn')}")
        self._print_dim(f">>> {_excerpt(turns[-1].prompt)}")
        for step in turns[-1].steps:
            for call in step.calls:
                self._print_dim(_excerpt(call_line(call)))
        self._print_dim(_excerpt(turns[-1].answer) + (" (stopped)" if turns[-1].stopped else ""))

    def _print_farewell(self) -> None:
        """Print the name of the stored session, and the command that continues it; or why the
        conversation is lost."""
        if self.recorder is None or not self.recorder.is_stored:
            failure = self.recorder.failure if self.recorder else self.storage_failure
            if failure and self.session.conversation.turns:
                self._print(one_line(f"this conversation is not stored: {failure}"), "yellow")
            return
        name = repr(self.recorder.record.name)
        with contextlib.suppress(LocalgenError):  # the store may have become unreadable
            name += f": localgen chat {self.recorder.options_to_reopen()}"
        self._print_dim(f"stored as {name}")

    def _prompt(self) -> str:
        branch = self.session.branch
        return ">>> " if branch == DEFAULT_BRANCH else f"{one_line(branch)} >>> "

    def _print_dim(self, line: str) -> None:
        self._print(one_line(line), "dim")

    def _print(self, text: str, style: str) -> None:
        self.console.print(Text(text, style=style), soft_wrap=False)


def _excerpt(text: str) -> str:
    line = collapse(text)
    return line if len(line) <= _EXCERPT_CHARS else line[: _EXCERPT_CHARS - 1].rstrip() + "…"


@contextlib.contextmanager
def _ignore_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl+C until the end of the block. Has no effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
