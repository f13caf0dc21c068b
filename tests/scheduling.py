"""Sequences and schedulers over a fake runner."""

from __future__ import annotations

import random

from fake_runner import END, VOCAB, FakeRunner, generate

from localgen.backends.adapters import Adapters, prefix_salt
from localgen.backends.engine.scheduler import Scheduler
from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def make(runner: FakeRunner, *, max_queue: int = 100, clock: Clock | None = None) -> Scheduler:
    budget = TokenBudget(runner.limits.max_batch_tokens, itl_target_ms=1e9)
    return Scheduler(runner, budget=budget, max_queue=max_queue, clock=clock or Clock())


def sequence(
    name: str,
    prompt: list[int],
    *,
    limit: int = 64,
    client: str = "",
    priority: int = 0,
    arrived_s: float = 0.0,
    ends: bool = True,
    adapters: Adapters = (),
) -> Sequence:
    return Sequence(
        id=name,
        tokens=list(prompt),
        num_prompt=len(prompt),
        params=SamplingParams(),
        ctx=limit,
        max_len=limit,
        stop_ids=frozenset({END}) if ends else frozenset(),
        client=client,
        priority=priority,
        arrived_s=arrived_s,
        adapters=adapters,
        cache_salt=prefix_salt("", adapters),
    )


def turn(scheduler: Scheduler, runner: FakeRunner) -> int:
    """One step; the number of chunks in it."""
    chunks = scheduler.plan()
    if chunks:
        scheduler.apply(chunks, runner.collect(runner.launch(chunks)), step_ms=1.0)
    return len(chunks)


def drain(scheduler: Scheduler, runner: FakeRunner, most: int = 100_000) -> None:
    for _ in range(most):
        if not turn(scheduler, runner):
            return
    raise AssertionError("the schedule does not end")


def guesses(seq: Sequence, rng: random.Random) -> list[int]:
    """Drafts of which the first few are right."""
    right = generate(seq.tokens, len(seq.tokens) + rng.randint(0, 4))
    return [*right, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 3)))]
