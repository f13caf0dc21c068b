"""Mixed requests with drafts, cancels and preemptions: both pools stay whole in every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import always_draft
from small_models import VOCAB, Small, SmallCuda, SmallLlama

from localgen.backends.engine.scheduler import Scheduler
from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.engine.speculation.policy import Speculation
from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.runner.interface import ModelRunner
from localgen.backends.runner.sequence import Sequence, SequenceState
from localgen.backends.sampling_params import BASE_SAMPLING

REQUESTS = 300
# too small for all sequences; the draft model's pool is smaller still
TARGET_TOKENS, DRAFT_TOKENS, CTX = 480, 320, 160
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.7, "top_k": 20},
    {"temperature": 0.5, "min_p": 0.1, "logprobs": 2},
    {"temperature": 0.9, "repeat_penalty": 1.2, "repeat_last_n": 32},
    {"temperature": 1.0, "min_tokens": 10},
]


@pytest.fixture(params=[SmallCuda, SmallLlama], ids=["cuda", "llama.cpp"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Small, Small]]:
    folder = tmp_path_factory.mktemp("small")
    with torch.inference_mode():
        target = request.param(folder, kv_tokens=TARGET_TOKENS, ctx=CTX)
        draft = request.param(folder, noise=0.1, kv_tokens=DRAFT_TOKENS, ctx=CTX)
        yield target, draft
    target.runner.close()
    draft.runner.close()


def asked(chance: random.Random, number: int) -> Sequence:
    """A random request; its prompt may share a prefix with another."""
    tokens = [7, *([number % 5] * 16), *(chance.randrange(VOCAB) for _ in range(9))]
    tokens = tokens[: chance.randrange(1, len(tokens))] * chance.choice((1, 1, 2, 3))
    settings = chance.choice(SETTINGS)
    limit = len(tokens) + chance.randrange(1, 60)
    return Sequence(
        id=str(number),
        tokens=tokens,
        num_prompt=len(tokens),
        params=replace(BASE_SAMPLING, seed=number, **settings),
        ctx=limit,
        max_len=limit,
        stop_ids=frozenset({11}),
        priority=chance.choice((0, 0, 0, 1)),
        can_sample_drafts=bool(settings["temperature"]) and chance.random() < 0.7,
    )


def check(small: Small) -> None:
    """Assert that both pools are consistent."""
    runner: Any = small.runner
    runner.kv_cache.check()
    usage = runner.usage()
    assert usage.used + usage.cached + usage.free == runner.limits.kv_tokens


def whole(runner: ModelRunner) -> bool:
    usage = runner.usage()
    return usage.used == 0 and usage.cached + usage.free == runner.limits.kv_tokens


def test_both_pools_are_whole(models: tuple[Small, Small], monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    target, draft = models
    runner, chance, seen = target.runner, random.Random(1), Counter[str]()
    # always_draft: the last drafter added drafts, if it can
    drafters = [NgramDrafter(), ModelDrafter(draft.runner, "draft")]
    budget = TokenBudget(256, 1e9)
    speculation = Speculation(drafters, budget.decode_costs, max_drafts=3)
    scheduler = Scheduler(runner, budget=budget, max_queue=REQUESTS)
    waiting = [asked(chance, number) for number in range(REQUESTS)]
    every = list(waiting)
    outputs = min(runner.limits.max_outputs, runner.limits.max_batch_tokens)
    while waiting or scheduler.has_work:
        for _ in range(min(len(waiting), chance.randrange(5))):
            scheduler.submit(waiting.pop())
        for seq, proposal in speculation.propose(
            scheduler.decoding, max_outputs=outputs, max_prefill_tokens=256
        ).items():
            scheduler.set_drafts(seq, proposal)
            seen["drawn"] += bool(proposal.draft_probs)
        chunks = scheduler.plan()
        if chunks:
            result = runner.collect(runner.launch(chunks))
            scheduler.apply(chunks, result, 1.0)
            speculation.observe(chunks, 1.0)
        if chance.random() < 0.15 and scheduler.running:
            scheduler.end(chance.choice(scheduler.running))
            seen["cancelled"] += 1
        check(target)
        check(draft)
    assert all(seq.state is SequenceState.ENDED for seq in every)
    assert whole(runner)
    speculation.propose([], max_outputs=0, max_prefill_tokens=0)  # nobody decodes any more
    assert whole(draft.runner)
    assert scheduler.counters.preemptions > 10
    assert seen["cancelled"] > 20
    assert bool(seen["drawn"]) == isinstance(target, SmallCuda)
    assert sum(seq.num_accepted for seq in every) > 300
    for seq in every:
        assert seq.num_accepted <= seq.num_drafted
        ended = seq.tokens[-1] == 11 and seq.num_generated > 0
        assert len(seq.tokens) <= seq.max_len
        assert 11 not in seq.tokens[seq.num_prompt : -1 if ended else None]
