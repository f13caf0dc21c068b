"""Several answers to one request: each is a request of its own to the engine, which computes what
their prompts have in common once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localgen.backends.types import Delta, Finished, Request, Timings

_SEEDS = 2**32


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer as it came."""

    deltas: Sequence[Delta]
    end: Finished


def repeated(requests: Sequence[Request], n: int) -> tuple[Request, ...]:
    """Each request n times, those of the first one first. Where there is a seed, each takes the
    next one, so that the same seed gives the same n texts."""
    if n == 1 and len(requests) == 1:
        return tuple(requests)
    return tuple(
        replace(
            request,
            id=f"{request.id}-{number * n + i}",
            params=replace(request.params, seed=_later(request.params.seed, i)),
        )
        for number, request in enumerate(requests)
        for i in range(n)
    )


def _later(seed: int | None, steps: int) -> int | None:
    return None if seed is None else (seed + steps) % _SEEDS


def together(ends: Sequence[Finished], n: int) -> Finished:
    """What n answers to each of some prompts took. A prompt counts once, and as cached what none
    of its n had to compute."""
    if len(ends) == 1:
        return ends[0]
    prompts = [ends[at : at + n] for at in range(0, len(ends), n)]
    reasons = [end.reason for end in ends]
    notes = [note for end in ends for note in end.notes]
    return replace(
        ends[0],
        reason=next((reason for reason in reasons if reason != "stop"), "stop"),
        timings=_timings([end.timings for end in ends], _cached(prompts)),
        prompt_tokens=sum(same[0].prompt_tokens for same in prompts),
        completion_tokens=sum(end.completion_tokens for end in ends),
        notes=tuple(dict.fromkeys(notes)),
    )


def _cached(prompts: Sequence[Sequence[Finished]]) -> int:
    return sum(min(end.timings.cache_n for end in same) for same in prompts)


def _timings(each: Sequence[Timings], cache_n: int) -> Timings:
    """They run side by side: the first token is that of the fastest, the last of the slowest."""
    prompt_n = sum(timings.prompt_n for timings in each)
    prompt_ms = max(timings.prompt_ms for timings in each)
    predicted_n = sum(timings.predicted_n for timings in each)
    predicted_ms = max(timings.predicted_ms for timings in each)
    return Timings(
        cache_n=cache_n,
        prompt_n=prompt_n,
        prompt_ms=prompt_ms,
        prompt_per_second=_rate(prompt_n, prompt_ms),
        predicted_n=predicted_n,
        predicted_ms=predicted_ms,
        predicted_per_second=_rate(predicted_n, predicted_ms),
        ttft_ms=min(timings.ttft_ms for timings in each),
        queue_ms=min(timings.queue_ms for timings in each),
        template_ms=max(timings.template_ms for timings in each),
        cached_ms=max(timings.cached_ms for timings in each),
        first_step_ms=max(timings.first_step_ms for timings in each),
    )


def _rate(tokens: int, ms: float) -> float:
    return tokens / ms * 1e3 if ms else 0.0
