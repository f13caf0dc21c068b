"""One-line texts: model, speed, speculation and context usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localgen.backends.model_info import ModelInfo
from localgen.backends.terminal_text import escape_name, one_line
from localgen.backends.types import PromptProgress, Timings, restored_text
from localgen.backends.units import (
    format_count,
    format_duration,
    format_rate,
    format_size,
)
from localgen.chat.parameters import ModelOptions

if TYPE_CHECKING:
    from localgen.client import Completion
    from localgen.client.snapshot import ModelSnapshot
    from localgen.machine.busy_processes import BusyProgram
    from localgen.mcp_tools.chat_tools import ChatTools

# gains of drafts below this are not shown under an answer
_MIN_SHOWN_GAIN = 1.1
# time saved by restored tokens below this is not shown either
_MIN_SHOWN_SAVED_MS = 1000.0


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """Figures of an answer without a completion, as measured by the client.

    ttft_s: None before the first token. context_tokens: the context in use. max_context: None if
    unknown. approx_mark, context_mark: prefix of num_tokens and of context_tokens if estimated.
    prompt: how much of it is computed, if reported.
    """

    elapsed_s: float
    ttft_s: float | None
    num_tokens: int
    context_tokens: int
    max_context: int | None
    approx_mark: str = ""
    context_mark: str = "~"
    prompt: PromptProgress | None = None

    @property
    def exact_context(self) -> int | None:
        """Tokens of the context, or None if they are estimated."""
        return None if self.context_mark else self.context_tokens

    @property
    def rate(self) -> str:
        """Tokens per second after the first token; empty if unknown."""
        generating_s = self.elapsed_s - (self.ttft_s or 0.0)
        if self.ttft_s is None or self.num_tokens < 2 or not generating_s:
            return ""
        return self.approx_mark + format_rate((self.num_tokens - 1) / generating_s)


def model_line(info: ModelInfo) -> str:
    """The model in one line: name, type, size, context, draft model, backend and its reason."""
    why = info.backend_reason
    parts = (
        escape_name(info.name),
        info.description,
        format_size(info.size_bytes) if info.size_bytes else "",
        f"context {info.ctx:,}" if info.ctx else "",
        f"draft model {escape_name(info.draft.name)}" if info.draft else "",
        f"{info.backend} {info.processor}".strip() + (f" ({why})" if why else ""),
    )
    return " · ".join(part for part in parts if part)


def greeting_line(info: ModelInfo, memory_bytes: int | None) -> str:
    """The model at the start of a chat: name, context, memory in use, draft model, processor.

    memory_bytes: of the engine process; None if unknown, as on a remote server.
    """
    if memory_bytes is None:
        return model_line(info)
    parts = (
        info.name,
        f"{info.ctx:,} tokens of context",
        f"{format_size(memory_bytes)} of memory",
        f"draft model {info.draft.name}" if info.draft else "",
        info.processor,
    )
    return " · ".join(part for part in parts if part)


def completion_line(completion: Completion) -> str:
    """Speed, TTFT and context of an answer in one short line, without what is not known.

    The gain of drafts is in it from 10 % on, that of restored tokens from 1 s on; the verbose lines
    have the rest.
    """
    timings = completion.timings
    about = "~" if completion.estimated else ""
    rate = f"{about}{format_rate(timings.predicted_per_second)} tok/s"
    gain = timings.draft_speedup if timings.draft_n else 0.0
    used = _context_usage(completion)
    parts = (
        rate if _decode_rate(timings) else "",
        f"first token {format_duration(timings.ttft_ms)}",
        _restored_gain(timings),
        f"{gain:.1f}× with drafts" if gain >= _MIN_SHOWN_GAIN else "",
        used[0].replace("/", " of ") if used else "",
    )
    return " · ".join(part for part in parts if part)


def busy_cores(
    model: ModelSnapshot, programs: Sequence[BusyProgram], rate: float, full_rate: float
) -> str:
    """Why a model computes with fewer threads than the processor has cores, and what that costs.

    programs: the busiest first. rate, full_rate: tokens per second of this answer, and of the
    latest one with all cores, or 0 if unknown.
    """
    cores, free = model.threads_max or 0, model.threads or 0
    name = programs[0].name if programs else "other programs"
    if name.startswith("python"):  # as localgen is
        name = f"another {name}"
    busy = f"{cores - free} of {format_count(cores, 'core')} busy with {name}"
    if not 0 < rate < full_rate:
        return busy
    return f"{busy}: {format_rate(rate)} instead of {format_rate(full_rate)} tokens/s"


def live_stats_line(figures: LiveFigures) -> str:
    """Statistics of an answer that is being generated, in one line."""
    limit = f"/{figures.max_context:,}" if figures.max_context is not None else ""
    context = f"context {figures.context_mark}{figures.context_tokens:,}{limit}"
    if figures.ttft_s is None:
        if figures.prompt:
            context = f"context {figures.prompt.total:,}{limit}"
        waiting = waiting_text(figures.elapsed_s, figures.prompt)
        return f"{waiting} · {context} · Ctrl+C stops"
    rate = f" at {figures.rate}/s" if figures.rate else ""
    tokens = f"{figures.approx_mark}{format_count(figures.num_tokens, 'token')}{rate}"
    return f"TTFT {format_duration(figures.ttft_s * 1000)} · {tokens} · {context}"


def loading_text(fraction: float) -> str:
    """Progress of loading a model: once its file is read, the engine makes ready."""
    return f"loading {fraction:.0%}" if fraction < 0.995 else "loaded, getting ready"


def waiting_text(elapsed_s: float, prompt: PromptProgress | None) -> str:
    """What is known before the first token: the time, and how much of the prompt is computed."""
    waiting = f"waiting {elapsed_s:.1f} s"
    if prompt is None:
        return waiting
    return f"{waiting} · prompt {prompt.computed:,} of {prompt.total:,} tokens"


def stopped_line(figures: LiveFigures) -> str:
    """completion_line() of an answer that was stopped."""
    limit = f" of {figures.max_context:,}" if figures.max_context is not None else ""
    parts = (
        f"{figures.rate} tok/s" if figures.rate else "",
        f"first token {format_duration(figures.ttft_s * 1000)}" if figures.ttft_s else "",
        f"{figures.context_mark}{figures.context_tokens:,}{limit}",
    )
    return " · ".join(part for part in parts if part)


def verbose_stats_lines(completion: Completion, load_ms: float) -> list[str]:
    """Lines of `--verbose`: load time, prefill and decode speed, TTFT, speculation, context."""
    if completion.client_measured:
        return _remote_stats_lines(completion)
    timings = completion.timings
    prompt_rate = f", {timings.prompt_per_second:.1f} tokens/s" if timings.prompt_per_second else ""
    return [
        f"load:       {format_duration(load_ms)}",
        f"prompt:     {format_count(completion.prompt_tokens or 0, 'token')}, "
        f"{completion.cached_tokens or 0:,} cached, "
        f"{timings.prompt_n:,} in {format_duration(timings.prompt_ms)}{prompt_rate}",
        f"generated:  {format_count(completion.completion_tokens, 'token')} in "
        + ", ".join((format_duration(timings.predicted_ms), *_decode_rate(timings))),
        f"TTFT:       {format_duration(timings.ttft_ms)}, "
        f"queue {format_duration(timings.queue_ms)}, "
        f"template {format_duration(timings.template_ms)}",
        *([f"restored:   {restored_text(timings.restored)}"] if timings.restored else []),
        *([f"prefix:     {timings.prefix_break}"] if timings.prefix_break else []),
        f"drafts:     {_speculation_details(timings)}",
        *(f"context:    {place}" for place in _context_usage(completion)),
    ]


def tool_lines(tools: ChatTools) -> list[str]:
    """The servers whose tools are offered, in a line; nothing if there are none."""
    if not tools.servers:
        return []
    return [f"tools of {tool_counts(tools)}; /mcp lists them"]


def tool_counts(tools: ChatTools) -> str:
    """The servers whose tools are offered, with the number of tools; empty if there are none."""
    return ", ".join(f"{name} ({len(offered)})" for name, offered in tools.servers.items())


def completion_warnings(completion: Completion, *, in_chat: bool = True) -> list[str]:
    """Warnings to show with an answer: the token limit, and the server's notes."""
    # the notes of the local server name the limit that was reached
    if completion.finish_reason == "length" and (
        completion.client_measured or not completion.notes
    ):
        option = "/set parameter max_tokens" if in_chat else "-n"
        return [f"cut at the token limit: raise it with {option}", *completion.notes]
    if completion.finish_reason == "cancelled":
        return ["cancelled from another program", *completion.notes]
    return list(completion.notes)


def answer_summary(completion: Completion, options: ModelOptions, info: ModelInfo | None) -> str:
    """Text stored with an answer: model, figures and warnings; all figures if verbose."""
    figures = [completion_line(completion)] if options.figures else []
    lines = [" · ".join((completion.model, *figures)), *completion_warnings(completion)]
    if options.verbose and info is not None:
        lines += verbose_stats_lines(completion, info.load_ms)
    return "\n".join(map(one_line, lines))


def _remote_stats_lines(completion: Completion) -> list[str]:
    timings = completion.timings
    about = "~" if completion.estimated else ""
    guessed = " (text chunks: the server reports no count)" if completion.estimated else ""
    return [
        *(f"prompt:     {prompt}" for prompt in _prompt_tokens(completion)),
        f"generated:  {about}{format_count(completion.completion_tokens, 'token')}{guessed} in "
        + ", ".join((format_duration(timings.predicted_ms), *_decode_rate(timings))),
        f"TTFT:       {format_duration(timings.ttft_ms)}, "
        "measured by the client, network included, like the rate",
        *(f"context:    {place}" for place in _context_usage(completion)),
    ]


def _prompt_tokens(completion: Completion) -> list[str]:
    """Prompt tokens, cached and new, if the server reports them."""
    if completion.prompt_tokens is None:
        return []
    if completion.cached_tokens is None:
        return [f"{completion.prompt_tokens:,} prompt tokens"]
    return [f"{completion.cached_tokens:,} cached + {completion.timings.prompt_n:,} new"]


def _context_usage(completion: Completion) -> list[str]:
    """Used and maximum context, if the server reports them."""
    if completion.total_tokens is None:
        return []
    limit = f"/{completion.ctx:,}" if completion.ctx is not None else ""
    return [f"{completion.total_tokens:,}{limit}"]


def _restored_gain(timings: Timings) -> str:
    """Tokens that were not computed again: `4,096 tokens from disk in 0.2 s (54 s saved)`."""
    saved_ms = sum(part.saved_ms for part in timings.restored)
    return restored_text(timings.restored) if saved_ms >= _MIN_SHOWN_SAVED_MS else ""


def _speculation_details(timings: Timings) -> str:
    if not timings.draft_n:
        kind, _, reason = timings.draft_reason.partition(": ")
        return f"none: {reason or kind}" if kind else "none"
    by = f" by {', '.join(timings.draft_by)}" if timings.draft_by else ""
    return (
        f"{format_count(timings.draft_n, 'token')}{by}, {_acceptance_rate(timings)} accepted, "
        f"{_tokens_per_step(timings):.1f} tokens/step, "
        f"{timings.draft_speedup:.2f}× plain decode"
    )


def _tokens_per_step(timings: Timings) -> float:
    return (timings.predicted_n - 1) / max(1, timings.draft_steps)


def _acceptance_rate(timings: Timings) -> str:
    return f"{100 * timings.draft_n_accepted / timings.draft_n:.0f} %"


def _decode_rate(timings: Timings) -> tuple[str, ...]:
    # a rate needs at least two tokens
    speed = timings.predicted_per_second
    return (f"{speed:.1f} tokens/s",) if speed and timings.predicted_n > 1 else ()
