"""How speed, size and place in the context are written, one line at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localgen.backends.model_info import ModelInfo
from localgen.backends.types import Timings
from localgen.backends.units import format_count, format_duration, format_size

if TYPE_CHECKING:
    from localgen.client import Completion

# the only drafter that is no model
NGRAM_DRAFTER = "n-gram"


def model_line(info: ModelInfo) -> str:
    """The model in one line: name, what it is, size, context, where it runs and why there."""
    why = info.backend_reason
    parts = (
        info.name,
        info.description,
        format_size(info.size_bytes) if info.size_bytes else "",
        f"context {info.ctx:,}" if info.ctx else "",
        f"drafts by {info.draft.name}" if info.draft else "",
        f"{info.backend} {info.processor}".strip() + (f" ({why})" if why else ""),
    )
    return " · ".join(part for part in parts if part)


def completion_line(completion: Completion) -> str:
    """What stays under an answer. What another server does not tell is left out."""
    timings = completion.timings
    # it has to fit a line of the terminal: what took no time goes unsaid
    waits = (("queue", timings.queue_ms), ("template", timings.template_ms))
    ttft = [f"{name} {format_duration(ms)}" for name, ms in waits if ms >= 0.5]
    ttft += _prompt_tokens(completion)
    about = "~" if completion.estimated else ""
    speed = (
        f" at {about}{_format_rate(timings.predicted_per_second)}/s"
        if _decode_rate(timings)
        else ""
    )
    parts = (
        f"TTFT {format_duration(timings.ttft_ms)}" + (f" ({', '.join(ttft)})" if ttft else ""),
        about
        + format_count(completion.completion_tokens, "token")
        + speed
        + _speculation_summary(timings),
        *(f"context {place}" for place in _context_usage(completion)),
    )
    return " · ".join(parts)


def live_stats_line(
    elapsed_s: float,
    ttft_s: float | None,
    num_tokens: int,
    context_tokens: int,
    max_context: int | None,
    approx_mark: str = "",
) -> str:
    """What shows while an answer grows. context_tokens: an estimate until the server has counted.

    max_context: None where nobody tells. approx_mark: stands before a number of tokens that is a
    guess.
    """
    context = f"context ~{context_tokens:,}" + (
        f"/{max_context:,}" if max_context is not None else ""
    )
    if ttft_s is None:
        return f"waiting {elapsed_s:.1f} s · {context} · Ctrl+C stops"
    generating_s = elapsed_s - ttft_s
    speed = _format_rate((num_tokens - 1) / generating_s) if num_tokens > 1 and generating_s else ""
    rate = f" at {approx_mark}{speed}/s" if speed else ""
    tokens = f"{approx_mark}{format_count(num_tokens, 'token')}{rate}"
    return f"TTFT {format_duration(ttft_s * 1000)} · {tokens} · {context}"


def verbose_stats_lines(completion: Completion, load_ms: float) -> list[str]:
    """Load, prompt and its rate, answer and its rate, TTFT: what `--verbose` prints."""
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
        f"drafts:     {_speculation_details(timings)}",
        *(f"context:    {place}" for place in _context_usage(completion)),
    ]


def completion_warnings(completion: Completion) -> list[str]:
    """What the user should know of how the answer was served."""
    # our own server says which limit it was
    if completion.finish_reason == "length" and (
        completion.client_measured or not completion.notes
    ):
        limit = "cut at the token limit: -n or /set parameter max_tokens raises it"
        return [limit, *completion.notes]
    return list(completion.notes)


def _remote_stats_lines(completion: Completion) -> list[str]:
    timings = completion.timings
    about = "~" if completion.estimated else ""
    guessed = " (pieces of text: the server does not count)" if completion.estimated else ""
    return [
        *(f"prompt:     {prompt}" for prompt in _prompt_tokens(completion)),
        f"generated:  {about}{format_count(completion.completion_tokens, 'token')}{guessed} in "
        + ", ".join((format_duration(timings.predicted_ms), *_decode_rate(timings))),
        f"TTFT:       {format_duration(timings.ttft_ms)}, "
        "measured here like the rate, network included",
        *(f"context:    {place}" for place in _context_usage(completion)),
    ]


def _prompt_tokens(completion: Completion) -> list[str]:
    """The prompt's tokens as far as they are known."""
    if completion.prompt_tokens is None:
        return []
    if completion.cached_tokens is None:
        return [f"{completion.prompt_tokens:,} prompt tokens"]
    return [f"{completion.cached_tokens:,} cached + {completion.timings.prompt_n:,} new"]


def _context_usage(completion: Completion) -> list[str]:
    """The place in the context as far as it is known."""
    if completion.total_tokens is None:
        return []
    limit = f"/{completion.ctx:,}" if completion.ctx is not None else ""
    return [f"{completion.total_tokens:,}{limit}"]


def _speculation_summary(timings: Timings) -> str:
    """What drafts did, or in a word why there were none though they are on."""
    if not timings.draft_n:
        why, explained, _ = timings.draft_reason.partition(": ")
        return f" (no drafts: {why})" if explained else ""
    # repositories have long names
    models = [name.rpartition("/")[2] for name in timings.draft_by if name != NGRAM_DRAFTER]
    whose = f" of {', '.join(models)}" if models else ""
    speedup = f"{timings.draft_speedup:.1f}× by drafts{whose}"
    each = f"{_tokens_per_step(timings):.1f} a step"
    return f" ({speedup}, {_acceptance_rate(timings)} right, {each})"


def _speculation_details(timings: Timings) -> str:
    if not timings.draft_n:
        return f"none: {timings.draft_reason}" if timings.draft_reason else "none"
    by = f" by {', '.join(timings.draft_by)}" if timings.draft_by else ""
    return (
        f"{format_count(timings.draft_n, 'token')}{by}, {_acceptance_rate(timings)} right, "
        f"{_tokens_per_step(timings):.1f} tokens a step, "
        f"{timings.draft_speedup:.2f}× plain decoding"
    )


def _tokens_per_step(timings: Timings) -> float:
    return (timings.predicted_n - 1) / max(1, timings.draft_steps)


def _acceptance_rate(timings: Timings) -> str:
    return f"{100 * timings.draft_n_accepted / timings.draft_n:.0f} %"


def _format_rate(rate: float) -> str:
    """With one decimal below 100, where it says something."""
    return f"{rate:.1f}" if rate < 99.95 else f"{rate:,.0f}"


def _decode_rate(timings: Timings) -> tuple[str, ...]:
    # one token has no gap to measure a rate by
    speed = timings.predicted_per_second
    return (f"{speed:.1f} tokens/s",) if speed and timings.predicted_n > 1 else ()
