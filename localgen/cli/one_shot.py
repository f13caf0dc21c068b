"""Answer one prompt on standard output."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from localgen.backends.terminal_text import ProseStream, one_line
from localgen.chat import report
from localgen.chat.conversation import Conversation
from localgen.chat.parameters import ModelOptions
from localgen.cli.tables import json_text
from localgen.repl.load_progress import LoadProgressLine
from localgen.repl.plain_answer import CollectedAnswer, write_plain_answer

if TYPE_CHECKING:
    from localgen.client import Client, Completion


def answer_prompt(
    client: Client,
    progress_line: LoadProgressLine,
    model: str | None,
    prompt: str,
    options: ModelOptions,
    *,
    json_output: bool = False,
) -> None:
    """Load the model and print the answer on stdout, as text or one JSON record.

    Notes, statistics and, once the server runs, the client's notices go to stderr.
    """
    with progress_line:
        client.connect()
        with progress_line.notices_to(progress_line.print_notice):
            info = client.load(model, options.load, progress_line.update, options.keep_alive)
    if progress_line.has_loaded or options.verbose:
        _print_notices(*info.notes)
    messages = Conversation(options.system).messages_with_prompt(prompt)
    stream = client.chat(
        model,
        messages,
        options.params,
        ctx=options.ctx,
        priority=options.priority,
        save_prefix=options.save_prefix,
        on_overflow=options.on_overflow,
    )
    screen = _AnswerPrinter()
    with progress_line.notices_to(progress_line.print_notice):
        whole = (
            write_plain_answer(stream, _discard, _discard)
            if json_output
            else write_plain_answer(stream, screen.write_text, screen.write_reasoning)
        )
    screen.end()
    if json_output:
        print(json_text(_json_record(prompt, whole)))
    elif not whole.text.endswith("\n"):
        print(flush=True)
    _print_notices(*report.completion_warnings(whole.completion, in_chat=False))
    if options.verbose:
        _print_notices(*report.verbose_stats_lines(whole.completion, info.load_ms))


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


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


def _json_record(prompt: str, collected: CollectedAnswer) -> dict[str, Any]:
    answer = collected.completion
    return {
        "model": answer.model,
        "prompt": prompt,
        "reasoning": collected.reasoning,
        "text": collected.text,
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
