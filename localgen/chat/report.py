"""How speed, size and place in the context are written, one line at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localgen.backends.model_info import ModelInfo
from localgen.backends.types import Timings
from localgen.backends.units import count, duration, size

if TYPE_CHECKING:
    from localgen.client import Answer

# the only drafter that is no model
TEXT_DRAFTER = "n-gram"


def model_line(info: ModelInfo) -> str:
    """The model in one line: name, what it is, size, context, where it runs and why there."""
    why = info.backend_reason
    parts = (
        info.name,
        info.description,
        size(info.size_bytes) if info.size_bytes else "",
        f"context {info.ctx:,}" if info.ctx else "",
        f"drafts by {info.draft.name}" if info.draft else "",
        f"{info.backend} {info.processor}".strip() + (f" ({why})" if why else ""),
    )
    return " · ".join(part for part in parts if part)


def answer_line(answer: Answer) -> str:
    """What stays under an answer. What another server does not tell is left out."""
    timings = answer.timings
    # it has to fit a line of the terminal: what took no time goes unsaid
    waits = (("queue", timings.queue_ms), ("template", timings.template_ms))
    ttft = [f"{name} {duration(ms)}" for name, ms in waits if ms >= 0.5]
    ttft += _prompt(answer)
    about = "~" if answer.estimated else ""
    speed = f" at {about}{_number(timings.predicted_per_second)}/s" if _rate(timings) else ""
    parts = (
        f"TTFT {duration(timings.ttft_ms)}" + (f" ({', '.join(ttft)})" if ttft else ""),
        about + count(answer.completion_tokens, "token") + speed + _drafts(timings),
        *(f"context {place}" for place in _context(answer)),
    )
    return " · ".join(parts)


def live_line(
    waited_s: float,
    ttft_s: float | None,
    tokens: int,
    used: int,
    limit: int | None,
    about: str = "",
) -> str:
    """What shows while an answer grows. used: an estimate until the server has counted.

    limit: None where nobody tells. about: stands before a number of tokens that is a guess.
    """
    context = f"context ~{used:,}" + (f"/{limit:,}" if limit is not None else "")
    if ttft_s is None:
        return f"waiting {waited_s:.1f} s · {context} · Ctrl+C stops"
    generating_s = waited_s - ttft_s
    speed = _number((tokens - 1) / generating_s) if tokens > 1 and generating_s else ""
    rate = f" at {about}{speed}/s" if speed else ""
    return f"TTFT {duration(ttft_s * 1000)} · {about}{count(tokens, 'token')}{rate} · {context}"


def verbose_lines(answer: Answer, load_ms: float) -> list[str]:
    """Load, prompt and its rate, answer and its rate, TTFT: what `--verbose` prints."""
    if answer.measured_here:
        return _verbose_elsewhere(answer)
    timings = answer.timings
    prompt_rate = f", {timings.prompt_per_second:.1f} tokens/s" if timings.prompt_per_second else ""
    return [
        f"load:       {duration(load_ms)}",
        f"prompt:     {count(answer.prompt_tokens or 0, 'token')}, "
        f"{answer.cached_tokens or 0:,} cached, "
        f"{timings.prompt_n:,} in {duration(timings.prompt_ms)}{prompt_rate}",
        f"generated:  {count(answer.completion_tokens, 'token')} in "
        + ", ".join((duration(timings.predicted_ms), *_rate(timings))),
        f"TTFT:       {duration(timings.ttft_ms)}, queue {duration(timings.queue_ms)}, "
        f"template {duration(timings.template_ms)}",
        f"drafts:     {_drafts_at_length(timings)}",
        *(f"context:    {place}" for place in _context(answer)),
    ]


def warnings(answer: Answer) -> list[str]:
    """What the user should know of how the answer was served."""
    # our own server says which limit it was
    if answer.finish_reason == "length" and (answer.measured_here or not answer.notes):
        limit = "cut at the token limit: -n or /set parameter max_tokens raises it"
        return [limit, *answer.notes]
    return list(answer.notes)


def _verbose_elsewhere(answer: Answer) -> list[str]:
    timings = answer.timings
    about = "~" if answer.estimated else ""
    guessed = " (pieces of text: the server does not count)" if answer.estimated else ""
    return [
        *(f"prompt:     {prompt}" for prompt in _prompt(answer)),
        f"generated:  {about}{count(answer.completion_tokens, 'token')}{guessed} in "
        + ", ".join((duration(timings.predicted_ms), *_rate(timings))),
        f"TTFT:       {duration(timings.ttft_ms)}, measured here like the rate, network included",
        *(f"context:    {place}" for place in _context(answer)),
    ]


def _prompt(answer: Answer) -> list[str]:
    """The prompt's tokens as far as they are known."""
    if answer.prompt_tokens is None:
        return []
    if answer.cached_tokens is None:
        return [f"{answer.prompt_tokens:,} prompt tokens"]
    return [f"{answer.cached_tokens:,} cached + {answer.timings.prompt_n:,} new"]


def _context(answer: Answer) -> list[str]:
    """The place in the context as far as it is known."""
    if answer.total_tokens is None:
        return []
    limit = f"/{answer.ctx:,}" if answer.ctx is not None else ""
    return [f"{answer.total_tokens:,}{limit}"]


def _drafts(timings: Timings) -> str:
    """What drafts did, or in a word why there were none though they are on."""
    if not timings.draft_n:
        why, explained, _ = timings.draft_reason.partition(": ")
        return f" (no drafts: {why})" if explained else ""
    # repositories have long names
    models = [name.rpartition("/")[2] for name in timings.draft_by if name != TEXT_DRAFTER]
    whose = f" of {', '.join(models)}" if models else ""
    each = f"{_per_step(timings):.1f} a step"
    return f" ({timings.draft_speedup:.1f}× by drafts{whose}, {_right(timings)} right, {each})"


def _drafts_at_length(timings: Timings) -> str:
    if not timings.draft_n:
        return f"none: {timings.draft_reason}" if timings.draft_reason else "none"
    by = f" by {', '.join(timings.draft_by)}" if timings.draft_by else ""
    return (
        f"{count(timings.draft_n, 'token')}{by}, {_right(timings)} right, "
        f"{_per_step(timings):.1f} tokens a step, {timings.draft_speedup:.2f}× plain decoding"
    )


def _per_step(timings: Timings) -> float:
    return (timings.predicted_n - 1) / max(1, timings.draft_steps)


def _right(timings: Timings) -> str:
    return f"{100 * timings.draft_n_accepted / timings.draft_n:.0f} %"


def _number(rate: float) -> str:
    """With one decimal below 100, where it says something."""
    return f"{rate:.1f}" if rate < 99.95 else f"{rate:,.0f}"


def _rate(timings: Timings) -> tuple[str, ...]:
    # one token has no gap to measure a rate by
    speed = timings.predicted_per_second
    return (f"{speed:.1f} tokens/s",) if speed and timings.predicted_n > 1 else ()
