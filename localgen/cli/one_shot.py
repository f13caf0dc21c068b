"""One prompt, one answer, on standard output."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text as Styled

from localgen.backends.terminal_text import inert, one_line
from localgen.chat import report
from localgen.chat.conversation import Conversation
from localgen.chat.parameters import ModelOptions
from localgen.cli.tables import json_text
from localgen.repl.load_progress import Loading
from localgen.repl.plain_answer import Whole, stream_plain

if TYPE_CHECKING:
    from localgen.client import Answer, ModelClient


def answer_one(
    client: ModelClient,
    loading: Loading,
    model: str | None,
    prompt: str,
    options: ModelOptions,
    *,
    as_json: bool = False,
) -> None:
    """Load the model, answer the prompt on stdout as text or one JSON record, notes on stderr."""
    with loading:
        client.connect()
        info = client.load(model, options.load, loading.progress, options.keep_alive)
    if loading.happened or options.verbose:
        _tell(*info.notes)
    messages = Conversation(options.system).asking(prompt)
    stream = client.chat(
        model, messages, options.params, ctx=options.ctx, priority=options.priority
    )
    screen = _Screen()
    whole = (
        stream_plain(stream, _silent, _silent)
        if as_json
        else stream_plain(stream, screen.write, screen.think)
    )
    if as_json:
        print(json_text(_record(prompt, whole)))
    elif not whole.text.endswith("\n"):
        print(flush=True)
    _tell(*report.warnings(whole.answer))
    if options.verbose:
        _tell(*report.verbose_lines(whole.answer, info.load_ms))


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


class _Screen:
    """Writes an answer on stdout; what is thought before it on stderr, if that is a terminal."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._is_thinking = False

    def think(self, text: str) -> None:
        if self._console.is_terminal:
            self._is_thinking = True
            self._console.print(Styled(inert(text), style="dim"), end="", soft_wrap=True)

    def write(self, text: str) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self._console.print("\n")
        # a file gets the text as it is, a terminal must not obey it
        sys.stdout.write(inert(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def _silent(_text: str) -> None:
    pass


def _tell(*lines: str) -> None:
    for line in lines:
        print(one_line(line) if "\n" in line else inert(line), file=sys.stderr)


def _record(prompt: str, whole: Whole) -> dict[str, Any]:
    answer = whole.answer
    return {
        "model": answer.model,
        "prompt": prompt,
        "reasoning": whole.reasoning,
        "text": whole.text,
        "finish_reason": answer.finish_reason,
        "stop": answer.stop,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.total_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            **({"estimated": True} if answer.estimated else {}),
        },
        "timings": _timings(answer),
        "ctx": answer.ctx,
        "seed": answer.seed,
        "notes": list(answer.notes),
    }


def _timings(answer: Answer) -> dict[str, Any]:
    found = asdict(answer.timings)
    if not answer.measured_here:
        return found
    seen_here = ("ttft_ms", "predicted_n", "predicted_ms", "predicted_per_second")
    return {"measured": "client", **{name: found[name] for name in seen_here}}
