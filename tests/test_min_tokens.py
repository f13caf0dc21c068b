"""min_tokens: no end token, stop token or stop string ends an answer earlier; later ones do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fake_runner import FakeRunner
from models import Bench, LoadedBench, noisy, questions
from test_cuda_runner import CudaBench
from test_engine import Log, expected_text, make, request, run_until_ended
from test_llamacpp_runner import guess

from localgen.backends.errors import ContextExceeded
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Failed, Finished

CHATS = questions(8)
GREEDY = SamplingParams(temperature=0, max_tokens=50)
# differences by rounding, see test_cuda_runner
NOISE = 0.05

BACKENDS: dict[str, Callable[[], LoadedBench]] = {
    "llamacpp": lambda: Bench(LoadOptions()),
    "cuda": CudaBench,
    "cuda ahead": lambda: CudaBench(as_on_gpu=True),
}


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest) -> Iterator[LoadedBench]:
    made = BACKENDS[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_comes_before(bench: LoadedBench, temperature: float) -> None:
    params = replace(GREEDY, temperature=temperature, seed=3)
    plain = bench.ask(CHATS, params)
    assert min(reply.finished.completion_tokens for reply in plain) < 15, "there is an end to bar"
    for reply in bench.ask(CHATS, replace(params, min_tokens=25)):
        end = reply.finished
        # with the end token itself, an answer of 25 tokens has 26
        assert 26 <= end.completion_tokens <= 50
        assert end.reason == ("length" if end.completion_tokens == 50 else "stop")


def test_the_text_up_to_the_end_is_the_same(bench: LoadedBench) -> None:
    for chat in CHATS[:3]:
        (plain,) = bench.ask([chat], GREEDY)
        assert plain.finished.reason == "stop"
        tokens = plain.finished.completion_tokens - 1
        (longer,) = bench.ask([chat], replace(GREEDY, min_tokens=tokens + 5))
        assert longer.text.startswith(plain.text)
        assert longer.finished.completion_tokens > tokens + 5
        (just,) = bench.ask([chat], replace(GREEDY, min_tokens=tokens))
        assert (just.text, just.finished.completion_tokens) == (plain.text, tokens + 1)


def test_stop_token_does_not_end_an_answer_before(bench: LoadedBench) -> None:
    said = replace(GREEDY, logprobs=1, ignore_eos=True)
    (plain,) = bench.ask(CHATS[:1], said)
    common = plain.tokens[2]
    (reply,) = bench.ask(CHATS[:1], replace(said, stop_token_ids=(common,), min_tokens=12))
    assert common not in reply.tokens[:12]
    assert len(reply.tokens) > 12


def test_with_logprobs_and_penalties_too(bench: LoadedBench) -> None:
    params = replace(GREEDY, min_tokens=30, logprobs=2, repeat_penalty=1.2, logit_bias={5: 1.0})
    ends = bench.model.tokenizer.eos_token_ids
    for reply in bench.ask(CHATS[:4], params):
        assert ends.isdisjoint(reply.tokens[:30])
        # reported probabilities are the model's own: the end token may have been the most probable
        assert all(position.top[0].logprob > -20 for position in reply.logprobs)


def test_an_ended_grammar_ends_the_answer(bench: LoadedBench) -> None:
    held = replace(GREEDY, regex="[a-z]{2}", min_tokens=30)
    (reply,) = bench.ask(CHATS[:1], held)
    assert reply.finished.reason == "stop"
    assert len(reply.text) == 2
    open_ended = replace(held, regex="[a-z ]*")
    (longer,) = bench.ask(CHATS[:1], open_ended)
    assert longer.finished.completion_tokens > 30


@pytest.mark.parametrize("name", ["llamacpp", "cuda"])
def test_drafts_change_nothing(name: str) -> None:
    bench = BACKENDS[name]()
    params = replace(GREEDY, logprobs=2, min_tokens=25)
    alone = bench.ask_one_by_one(CHATS, params)
    rng = random.Random(3)
    scheduler = bench.engine._scheduler
    answers: dict[str, list[int]] = {}
    plan = scheduler.plan

    def plan_with_drafts() -> object:
        for seq in scheduler.running:
            if seq.is_decoding:
                ends = sorted(bench.model.tokenizer.eos_token_ids)
                seq.drafts = [*guess(seq, answers[seq.id], rng), *ends[: rng.randint(0, 1)]]
        return plan()

    scheduler.plan = plan_with_drafts  # type: ignore[method-assign, assignment]
    names = []
    for chat, reply in zip(CHATS, alone, strict=True):
        names.append(bench.submit(chat, params))
        answers[names[-1]] = reply.tokens
    assert noisy(bench.run(names), alone, NOISE) <= 1
    bench.close()


@pytest.mark.parametrize("least", [0, 4, 7, 30])
def test_stop_string_does_not_end_an_answer_before(least: int) -> None:
    whole = expected_text("hello", 60)
    stop = whole[7:9]
    log = Log()
    engine = make(runner := FakeRunner(), log)
    engine.submit(request("r", "hello", max_tokens=55, stop=(stop,), min_tokens=least))
    run_until_ended(engine, log, 1)
    (end,) = log.ends["r"]
    assert isinstance(end, Finished)
    at = whole.find(stop, least)
    assert log.text["r"] == (whole[:at] if at >= 0 else whole)
    assert end.stop == (stop if at >= 0 else None)
    runner.check()


def test_min_tokens_over_the_context_is_rejected() -> None:
    log = Log()
    engine = make(FakeRunner(kv_tokens=64), log)
    engine.submit(request("r", "hello", min_tokens=60))
    run_until_ended(engine, log, 1)
    (end,) = log.ends["r"]
    assert isinstance(end, Failed)
    assert end.code == ContextExceeded.code
    assert "5 tokens and min_tokens 60, the context is 64" in end.message
