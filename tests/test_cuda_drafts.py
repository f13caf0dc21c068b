"""Drafts in the CUDA runner on the CPU: greedy and seeded answers are the same as without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from drafting import always_draft
from models import Reply, moved, noisy, questions
from test_cuda_runner import TINY, CudaBench
from test_llamacpp_drafts import COPY, GREEDY, SETTINGS

from localgen.backends.cuda.loader import load_cuda_model
from localgen.backends.cuda.steps.run_ahead import RunAheadStep
from localgen.backends.cuda.steps.sampler import UNSUPPORTED_PARAMS
from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.runner.interface import Chunk
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

NOISE, MAX_NOISY = 0.02, 1
CHATS = [*questions(7), *COPY]
OURS = {
    name: params
    for name, params in SETTINGS.items()
    if all(
        getattr(params, field) in (None, getattr(BASE_SAMPLING, field))
        for field in UNSUPPORTED_PARAMS
    )
}
# no seed: drafts are drawn
FREE = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=40, logprobs=1, ignore_eos=True)


def draft_model(**options: object) -> ModelDrafter:
    """The built-in model."""
    asked = LoadOptions(backend="cuda", device="cpu", **{"kv_tokens": 8192, **options})  # type: ignore[arg-type]
    return ModelDrafter(
        load_cuda_model(ModelLoadRequest("draft", str(TINY), asked), lambda _share: None).runner, ""
    )


DRAFTERS: dict[str, Callable[[], Drafter]] = {"n-gram": NgramDrafter, "draft model": draft_model}


def sampled_acceptance(drafter: ModelDrafter) -> float:
    """Acceptance estimate of sampled drafts, over all sequences."""
    return drafter._shared[True].value


def whole(drafters: Seq[Drafter]) -> None:
    """Assert that the draft model's pool is whole; close it."""
    for drafter in drafters:
        if isinstance(drafter, ModelDrafter):
            assert drafter._runner.usage().used == 0
        drafter.close()


# the sampler verifies drafts, whoever proposed them; a draft model also samples with the parameters
CASES = [
    *((("n-gram", True), name) for name in OURS),
    *((("n-gram", False), name) for name in ("greedy", "sampled", "stop", "schema")),
    *((("draft model", False), name) for name in ("greedy", "sampled", "penalties", "schema")),
]


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[CudaBench]:
    kind, as_on_gpu = request.param
    drafters = [DRAFTERS[kind]()]
    bench = CudaBench(as_on_gpu=as_on_gpu, drafters=drafters)
    yield bench
    bench.close()
    whole(drafters)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Reply]]:
    """Every answer without drafts."""
    bench = CudaBench()
    replies = {name: bench.ask(CHATS, params) for name, params in OURS.items()}
    bench.close()
    return replies


def test_settings_cover_every_kind() -> None:
    assert OURS.keys() >= {"greedy", "sampled", "top p", "min p", "penalties", "stop", "schema"}


@pytest.mark.parametrize(("bench", "name"), CASES, indirect=["bench"])
def test_answers_are_the_same_with_drafts(
    bench: CudaBench,
    plain: dict[str, list[Reply]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_draft(monkeypatch)
    drafted = bench.stats.speculation.draft_tokens_total
    replies = bench.ask(CHATS, OURS[name])
    if OURS[name].temperature == 0:
        assert noisy(replies, plain[name], NOISE) <= MAX_NOISY
    else:
        assert moved(replies, plain[name], NOISE) <= MAX_NOISY
    assert bench.stats.speculation.draft_tokens_total > drafted
    for reply in replies:
        assert reply.finished.seed is not None
        if OURS[name].logprobs:
            assert len(reply.logprobs) >= reply.finished.completion_tokens - 1
        if name == "schema" and reply.finished.reason == "stop":
            assert json.loads(reply.text).keys() >= {"name", "age"}


def test_answers_are_the_same_with_drafts_and_preemption(
    plain: dict[str, list[Reply]], monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    drafters: list[Drafter] = [NgramDrafter(), draft_model(kv_tokens=400, ctx=160)]
    crowded = CudaBench(drafters=drafters, ctx=160, kv_tokens=400)
    for name in ("greedy", "sampled"):
        replies = crowded.ask(CHATS, OURS[name])
        same = sum(a.tokens == b.tokens for a, b in zip(replies, plain[name], strict=True))
        assert same >= len(replies) - MAX_NOISY
    assert crowded.stats.num_preemptions_total > 0, "the pool was too small for all"
    crowded.close()
    whole(drafters)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_answers_are_the_same_with_drafts_and_run_ahead(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # long answers: many steps, whenever a prompt arrives
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    undrafted = CudaBench()
    expected = [reply.text for reply in undrafted.ask(CHATS, params)]
    undrafted.close()
    # two plain steps after each with drafts: the second is launched behind the first
    always_draft(monkeypatch, plain_every=1)
    used: list[bool] = []
    split = RunAheadStep.split

    def spy(ahead: RunAheadStep, chunks: Seq[Chunk]) -> tuple[Seq[Chunk], Seq[Chunk]]:
        covered, rest = split(ahead, chunks)
        used.extend([True] * len(covered) + [False] * len(rest))
        return covered, rest

    monkeypatch.setattr(RunAheadStep, "split", spy)
    drafters = [DRAFTERS[kind]()]
    bench = CudaBench(as_on_gpu=True, drafters=drafters)
    texts = [reply.text for reply in bench.ask(CHATS, params)]
    assert sum(map(str.__eq__, texts, expected)) >= len(CHATS) - MAX_NOISY
    assert True in used, "steps were launched ahead"
    assert False in used, "and some in vain"
    assert bench.stats.speculation.draft_tokens_total > 0
    bench.close()
    whole(drafters)


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_drawn_drafts_of_a_model_that_is_the_target_are_kept(
    as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p and q are equal but for rounding. Greedy drafts would be accepted far less often."""
    always_draft(monkeypatch)
    drafter = draft_model()
    bench = CudaBench(as_on_gpu=as_on_gpu, drafters=[drafter])
    replies = bench.ask(CHATS, FREE)
    told = bench.stats.speculation
    # drafts beyond the end of an answer cannot be accepted
    assert told.accepted_tokens_total > 0.9 * told.draft_tokens_total - 5 * len(CHATS)
    assert sampled_acceptance(drafter) > 0.95
    assert all(reply.finished.seed is None for reply in replies), "no seed gives that again"
    bench.close()
    whole([drafter])


def test_drawn_drafts_within_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    drafter = draft_model()
    bench = CudaBench(drafters=[drafter])
    schema = replace(OURS["schema"], temperature=1.0, seed=None, max_tokens=80)
    for reply in bench.ask(CHATS, schema):
        if reply.finished.reason == "stop":
            assert json.loads(reply.text).keys() >= {"name", "age"}
    assert sampled_acceptance(drafter) != 0.6, "drafts were drawn"
    bench.close()
    whole([drafter])


def test_drafts_are_not_sampled_for_greedy_or_seeded_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_draft(monkeypatch)
    drafter = draft_model()
    bench = CudaBench(drafters=[drafter])
    for params in (GREEDY, replace(FREE, seed=5)):
        bench.ask(CHATS[:3], params)
    assert sampled_acceptance(drafter) == 0.6, "as assumed: nothing was drawn"
    bench.close()
    whole([drafter])
