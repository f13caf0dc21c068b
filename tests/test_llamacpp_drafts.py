"""Drafts on llama.cpp: the same answers with any drafter and any sampling setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from drafting import DRAFTS, always_draft
from models import TINY_GGUF, Bench, Reply, moved, noisy, questions
from test_engine import until_prepared

from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message

# as in test_llamacpp_runner
NOISE, MAX_NOISY = 0.02, 2
MAX_MOVED = 5  # of 25
CHATS = questions(24)
GREEDY = SamplingParams(temperature=0, max_tokens=60, logprobs=2)
COPY = [
    (
        Message(
            "user",
            "Repeat this: the red fox runs, the red fox sleeps, the red fox runs, the red fox",
        ),
    )
]
SETTINGS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.8, seed=7, ignore_eos=True),
    "top p": replace(GREEDY, temperature=1.0, top_p=0.7, seed=3),
    "min p": replace(GREEDY, temperature=1.2, min_p=0.1, seed=4),
    "penalties": replace(GREEDY, repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "mirostat": replace(GREEDY, temperature=0.8, mirostat=2, seed=5),
    "stop": replace(GREEDY, stop=(" the", "ing")),
    "schema": replace(
        GREEDY,
        json_schema=json.dumps(
            {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            }
        ),
    ),
    "least": replace(GREEDY, min_tokens=30),
}


def draft_model() -> Drafter:
    """The built-in model, which agrees with itself when it is greedy."""
    options = LoadOptions(kv_tokens=8192, ctx=2048, threads=2)
    return ModelDrafter(
        load_llamacpp_model(
            ModelLoadRequest("draft", str(TINY_GGUF), options), lambda _share: None
        ).runner,
        "",
    )


@pytest.fixture
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    always_draft(monkeypatch)
    made: dict[str, Seq[Callable[[], Drafter]]] = {
        "n-gram": (NgramDrafter,),
        "draft model": (draft_model,),
        "both": (draft_model, NgramDrafter),
    }
    drafters = [make() for make in made[request.param]]
    bench = Bench(LoadOptions(kv_tokens=16384), drafters=drafters)
    yield bench
    assert not bench.engine._scheduler.has_work
    bench.close()
    for drafter in drafters:
        if isinstance(drafter, ModelDrafter):
            usage = drafter._runner.usage()
            assert usage.used == 0, "the draft model's pool is whole"
        drafter.close()


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Reply]]:
    """Every answer without drafts."""
    bench = Bench(LoadOptions(kv_tokens=16384))
    replies = {name: bench.ask([*CHATS, *COPY], params) for name, params in SETTINGS.items()}
    bench.close()
    return replies


# which of two drafters proposes does not depend on the setting
CASES = [
    *((drafter, name) for drafter in ("n-gram", "draft model") for name in SETTINGS),
    *(("both", name) for name in ("greedy", "sampled", "schema")),
]


@pytest.mark.parametrize(("bench", "name"), CASES, indirect=["bench"])
def test_answers_are_the_same_with_drafts(
    bench: Bench, plain: dict[str, list[Reply]], name: str
) -> None:
    replies = bench.ask([*CHATS, *COPY], SETTINGS[name])
    if SETTINGS[name].temperature == 0:
        assert noisy(replies, plain[name], NOISE) <= MAX_NOISY
    else:
        assert moved(replies, plain[name], NOISE) <= MAX_MOVED
    told = bench.stats.speculation
    assert told.draft_tokens_total > 0
    timings = [reply.finished.timings for reply in replies]
    ours = sum(t.draft_n for t in timings), sum(t.draft_n_accepted for t in timings)
    all_of_them = told.draft_tokens_total, told.accepted_tokens_total
    if name == "stop":  # a step may be on its way when a stop string is found
        assert all(0 < one <= total for one, total in zip(ours, all_of_them, strict=True))
    else:
        assert ours == all_of_them


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_answers_are_the_same_with_drafts_and_preemption(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(SETTINGS[name], ignore_eos=True)
    roomy = Bench(LoadOptions(kv_tokens=16384))
    expected = roomy.ask(CHATS, params)
    roomy.close()
    always_draft(monkeypatch)
    drafters = [NgramDrafter(), draft_model()]
    crowded = Bench(LoadOptions(parallel=8, ctx=256, kv_tokens=256), drafters=drafters)
    asked = [crowded.submit(chat, params) for chat in CHATS]
    until_prepared(crowded.engine)
    replies = crowded.run(asked)
    assert crowded.stats.num_preemptions_total > 0, "the pool was too small for all"
    assert crowded.stats.speculation.draft_tokens_total > 0
    if name == "greedy":
        assert noisy(replies, expected, NOISE) <= MAX_NOISY
    else:
        assert moved(replies, expected, NOISE) <= MAX_MOVED
    crowded.close()
    for drafter in drafters:
        drafter.close()


def test_a_greedy_draft_model_that_is_the_target_is_always_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_draft(monkeypatch)
    bench = Bench(LoadOptions(kv_tokens=8192), drafters=[draft_model()])
    bench.ask(CHATS[:8], GREEDY)
    told = bench.stats.speculation
    assert told.accepted_tokens_total > 0.9 * told.draft_tokens_total - 8 * DRAFTS
    assert told.tokens_per_step > 2
    bench.engine.stop()
    bench.engine.run()
    bench.close()
