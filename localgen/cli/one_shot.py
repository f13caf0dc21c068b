"""Answer one prompt on standard output."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from localgen.backends.errors import ContextExceeded
from localgen.backends.terminal_text import ProseStream, one_line
from localgen.backends.types import ToolCall
from localgen.chat import report
from localgen.chat.conversation import Conversation, ToolStep
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import result_chars, template_uses_reasoning
from localgen.cli.tables import json_text
from localgen.cli.tool_calls import one_shot_handlers
from localgen.mcp_tools.chat_tools import MAX_ROUNDS, ROUNDS_NOTICE, ChatTools, runnable_calls
from localgen.repl.load_progress import LoadProgressLine
from localgen.repl.plain_answer import CollectedAnswer, write_plain_answer

if TYPE_CHECKING:
    from localgen.backends.model_info import ModelInfo
    from localgen.client import Client, Completion


def answer_prompt(
    client: Client,
    progress_line: LoadProgressLine,
    model: str | None,
    prompt: str,
    options: ModelOptions,
    tools: ChatTools,
    *,
    json_output: bool = False,
) -> None:
    """Load the model and print the answer on stdout, as text or one JSON record.

    Notes, statistics, tool calls and, once the server runs, the client's notices go to stderr.
    """
    with progress_line:
        client.connect()
        with progress_line.notices_to(progress_line.print_notice):
            info = client.load(model, options.load, progress_line.update, options.keep_alive)
    if progress_line.has_loaded or options.verbose:
        _print_notices(*info.notes)
    session = _OneShot(client, model, prompt, options, tools, info)
    with progress_line.notices_to(progress_line.print_notice):
        whole = session.answer_part(is_shown=not json_output)
        while calls := runnable_calls(whole.completion, len(session.steps)):
            session.run_calls(whole, calls)
            whole = session.answer_part(is_shown=not json_output)
    if json_output:
        print(json_text(_json_record(prompt, whole, session.steps)))
    _print_notices(*report.completion_warnings(whole.completion, in_chat=False))
    if options.verbose:
        _print_notices(*report.verbose_stats_lines(whole.completion, info.load_ms))


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


class _OneShot:
    """The parts of one answer: each but the last ends with tool calls. steps: those so far."""

    def __init__(
        self,
        client: Client,
        model: str | None,
        prompt: str,
        options: ModelOptions,
        tools: ChatTools,
        info: ModelInfo,
    ) -> None:
        self.steps: tuple[ToolStep, ...] = ()
        self._client, self._model, self._options, self._tools = client, model, options, tools
        self._messages = Conversation(options.system).messages_with_prompt(prompt)
        self._with_reasoning = template_uses_reasoning(info)
        self._ctx = options.ctx or info.ctx

    def answer_part(self, *, is_shown: bool) -> CollectedAnswer:
        """Request the next part, and print it on stdout if it is shown."""
        try:
            return self._answer_part(is_shown=is_shown)
        except ContextExceeded as error:
            raise self._tools.with_remedy(error) from error

    def _answer_part(self, *, is_shown: bool) -> CollectedAnswer:
        options = self._options
        stream = self._client.chat(
            *(self._model, self._messages, options.params),
            ctx=options.ctx,
            priority=options.priority,
            save_prefix=options.save_prefix,
            on_overflow=options.on_overflow,
            tools=self._tools.offered,
            tool_choice="none" if len(self.steps) >= MAX_ROUNDS else "auto",
        )
        if not is_shown:
            return write_plain_answer(stream, _discard, _discard)
        screen = _AnswerPrinter()
        part = write_plain_answer(stream, screen.write_text, screen.write_reasoning)
        screen.end()
        is_last = not runnable_calls(part.completion, len(self.steps))
        if not part.text.endswith("\n") and (part.text or is_last):
            print(flush=True)
        return part

    def run_calls(self, part: CollectedAnswer, calls: tuple[ToolCall, ...]) -> None:
        """Run the calls that a part ends with. Raises KeyboardInterrupt if the user stops them."""
        results = self._tools.run(calls, one_shot_handlers(), result_chars(self._ctx))
        if results.was_stopped:
            raise KeyboardInterrupt
        step = ToolStep(part.text, part.reasoning, calls, results.texts)
        self.steps = (*self.steps, step)
        self._messages += step.messages(with_reasoning=self._with_reasoning)
        if len(self.steps) == MAX_ROUNDS:
            _print_notices(ROUNDS_NOTICE)


class _AnswerPrinter:
    """Writes the answer to stdout, and its reasoning to stderr if that is a terminal."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._reasoning, self._text = ProseStream(), ProseStream()
        self._in_reasoning = False

    def write_reasoning(self, text: str, *, last: bool = False) -> None:
        if self._console.is_terminal:
            self._in_reasoning = not last
            shown = Text(self._reasoning.feed(text, last=last), style="dim")
            self._console.print(shown, end="", soft_wrap=True)

    def write_text(self, text: str, *, last: bool = False) -> None:
        if self._in_reasoning:
            self.write_reasoning("", last=True)
            self._console.print("\n")
        # escape on a terminal only: files and pipes get the exact text
        sys.stdout.write(self._text.feed(text, last=last) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def end(self) -> None:
        r"""Write what is left, which is a \r at most."""
        write = self.write_reasoning if self._in_reasoning else self.write_text
        write("", last=True)


def _discard(_text: str) -> None:
    pass


def _print_notices(*lines: str) -> None:
    for line in lines:
        print(one_line(line), file=sys.stderr)


def _json_record(
    prompt: str, collected: CollectedAnswer, steps: tuple[ToolStep, ...]
) -> dict[str, Any]:
    answer = collected.completion
    return {
        "model": answer.model,
        "prompt": prompt,
        "reasoning": collected.reasoning,
        "text": collected.text,
        **({"steps": [asdict(step) for step in steps]} if steps else {}),
        "finish_reason": answer.finish_reason,
        "stop": answer.stop,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.total_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            **({"estimated": True} if answer.estimated else {}),
        },
        "timings": _timings_record(answer),
        "ctx": answer.ctx,
        "seed": answer.seed,
        "notes": list(answer.notes),
    }


def _timings_record(completion: Completion) -> dict[str, Any]:
    found = asdict(completion.timings)
    if not completion.client_measured:
        return found
    seen_here = ("ttft_ms", "predicted_n", "predicted_ms", "predicted_per_second")
    return {"measured": "client", **{name: found[name] for name in seen_here}}
