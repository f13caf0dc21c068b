"""Multiple choices per request: one engine request per choice.

The engine computes shared prompt prefixes only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from localgen.backends.types import Delta, Finished, Request, Timings, merged_restored

NUM_SEEDS = 2**32


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A finished choice with its deltas."""

    deltas: Sequence[Delta]
    finished: Finished


def requests_of_prompts(request: Request, prompts: Iterable[str | Sequence[int]]) -> list[Request]:
    """The request for each prompt, a text or token ids."""
    return [
        replace(request, prompt=prompt)
        if isinstance(prompt, str)
        else replace(request, prompt_tokens=tuple(prompt))
        for prompt in prompts
    ]


def fan_out_requests(requests: Sequence[Request], n: int) -> tuple[Request, ...]:
    """Repeat each request n times, grouped by request, with new ids.

    A seed is incremented per choice, so that the same seed reproduces the same n texts.
    """
    if n == 1 and len(requests) == 1:
        return tuple(requests)
    return tuple(
        replace(
            request,
            id=f"{request.id}-{number * n + i}",
            params=replace(request.params, seed=offset_seed(request.params.seed, i)),
        )
        for number, request in enumerate(requests)
        for i in range(n)
    )


def offset_seed(seed: int | None, offset: int) -> int | None:
    return None if seed is None else (seed + offset) % NUM_SEEDS


def merge_finished(finished: Sequence[Finished], n: int) -> Finished:
    """Merge the results of n choices per prompt into one.

    The tokens of a prompt count once; its cached tokens are the minimum over its choices.
    """
    if len(finished) == 1:
        return finished[0]
    prompts = [finished[at : at + n] for at in range(0, len(finished), n)]
    reasons = [end.reason for end in finished]
    notes = [note for end in finished for note in end.notes]
    return replace(
        finished[0],
        reason=next((reason for reason in reasons if reason != "stop"), "stop"),
        timings=_merge_timings([end.timings for end in finished], _shared_cached_tokens(prompts)),
        prompt_tokens=sum(same[0].prompt_tokens for same in prompts),
        completion_tokens=sum(end.completion_tokens for end in finished),
        notes=tuple(dict.fromkeys(notes)),
    )


def _shared_cached_tokens(finished_by_prompt: Sequence[Sequence[Finished]]) -> int:
    return sum(min(end.timings.cache_n for end in same) for same in finished_by_prompt)


def _merge_timings(all_timings: Sequence[Timings], num_cached_tokens: int) -> Timings:
    """Merge timings of concurrent requests: TTFT of the fastest, durations of the slowest."""
    prompt_n = sum(timings.prompt_n for timings in all_timings)
    prompt_ms = max(timings.prompt_ms for timings in all_timings)
    predicted_n = sum(timings.predicted_n for timings in all_timings)
    predicted_ms = max(timings.predicted_ms for timings in all_timings)
    return Timings(
        cache_n=num_cached_tokens,
        prompt_n=prompt_n,
        prompt_ms=prompt_ms,
        prompt_per_second=_tokens_per_s(prompt_n, prompt_ms),
        predicted_n=predicted_n,
        predicted_ms=predicted_ms,
        predicted_per_second=_tokens_per_s(predicted_n, predicted_ms),
        ttft_ms=min(timings.ttft_ms for timings in all_timings),
        queue_ms=min(timings.queue_ms for timings in all_timings),
        template_ms=max(timings.template_ms for timings in all_timings),
        cached_ms=max(timings.cached_ms for timings in all_timings),
        first_step_ms=max(timings.first_step_ms for timings in all_timings),
        prefix_break=next(filter(None, (timings.prefix_break for timings in all_timings)), None),
        restored=merged_restored([part for timings in all_timings for part in timings.restored]),
    )


def _tokens_per_s(tokens: int, ms: float) -> float:
    return tokens / ms * 1e3 if ms else 0.0
