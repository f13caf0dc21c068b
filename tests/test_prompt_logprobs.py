"""Logprobs of a prompt's tokens are those of teacher forcing, in both runners.

Neither chunks, batch mates, cached prefixes nor preemption change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from models import Bench, LoadedBench, Reply
from test_cuda_runner import NOISE, TINY, CudaBench
from transformers import AutoModelForCausalLM

from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Failed, Message, PositionLogprobs

TOP = 3
SCORED = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP)
TEXT = "What is 17 + 25? The answer is 42. A story: once upon a time there was a cat.\n" * 4


def bench_of(kind: str, **options: Any) -> LoadedBench:
    if kind == "llamacpp":
        return Bench(LoadOptions(**options))
    return CudaBench(as_on_gpu=kind == "cuda as on a gpu", **options)


@pytest.fixture(params=["llamacpp", "cuda", "cuda as on a gpu"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., LoadedBench]]:
    benches: list[LoadedBench] = []

    def made(**options: Any) -> LoadedBench:
        benches.append(bench_of(request.param, **options))
        return benches[-1]

    yield made
    for bench in benches:
        bench.close()


def prompts(bench: LoadedBench) -> list[list[int]]:
    """Prompts of 1, 2 and more tokens, of which the last ones begin alike."""
    tokens = bench.model.tokenizer.encode(TEXT)
    assert len(tokens) > 60
    return [tokens[:1], tokens[5:7], tokens[7:25], tokens[:60], [*tokens[:45], *tokens[3:20]]]


def score(
    bench: LoadedBench, prompt: Sequence[int], params: SamplingParams = SCORED, **more: object
) -> str:
    """Submit a prompt with echo; returns its request id."""
    return bench.submit((), params, messages=None, prompt_tokens=tuple(prompt), echo=True, **more)


@pytest.fixture(scope="module")
def forced() -> Callable[[Sequence[int]], torch.Tensor]:
    """Logprobs after each token of a text, by transformers: float32 [tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)

    def logprobs(tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([list(tokens)])).logits[0]
        return torch.log_softmax(logits.double(), -1)

    return logprobs


def check(
    positions: Sequence[PositionLogprobs], tokens: Sequence[int], exact: torch.Tensor
) -> None:
    """Assert that these are the logprobs of all tokens. exact: after each of them."""
    assert [position.chosen.token_id for position in positions] == list(tokens)
    assert [position.is_first for position in positions] == [True] + [False] * (len(tokens) - 1)
    assert positions[0].top == ()
    for position, before, token in zip(positions[1:], exact, tokens[1:], strict=False):
        assert position.chosen.logprob == pytest.approx(float(before[token]), abs=NOISE)
        best = before.topk(TOP)
        assert [entry.logprob for entry in position.top] == pytest.approx(
            best.values.tolist(), abs=NOISE
        )
        for entry in position.top:
            assert entry.logprob == pytest.approx(float(before[entry.token_id]), abs=NOISE)


def test_they_are_those_of_transformers(
    make: Callable[..., LoadedBench], forced: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    bench = make()
    asked = prompts(bench)
    replies = bench.run([score(bench, prompt) for prompt in asked])
    for prompt, reply in zip(asked, replies, strict=True):
        assert reply.finished.completion_tokens == 1
        check(reply.logprobs, [*prompt, reply.tokens[-1]], forced(prompt))
        text = b"".join(map(bench.model.tokenizer.piece, prompt)).decode(errors="replace")
        assert reply.text.startswith(text)


def scores(reply: Reply) -> list[float]:
    return [position.chosen.logprob for position in reply.logprobs if not position.is_first]


@pytest.mark.parametrize(
    "sizes", [{"max_batch_tokens": 7, "parallel": 3}, {"draft_max": 1, "parallel": 2}]
)
def test_chunks_do_not_change_them(make: Callable[..., LoadedBench], sizes: dict[str, int]) -> None:
    alone = make()
    asked = prompts(alone)
    expected = [alone.run([score(alone, prompt)])[0] for prompt in asked]
    bench = make(**sizes)
    limits = bench.model.runner.limits
    assert min(limits.max_outputs, limits.max_batch_tokens) < sum(map(len, asked))
    replies = bench.run([score(bench, prompt) for prompt in asked])
    for reply, reference in zip(replies, expected, strict=True):
        assert scores(reply) == pytest.approx(scores(reference), abs=NOISE)


def test_a_cached_prefix_is_computed_again_and_kept(make: Callable[..., LoadedBench]) -> None:
    bench = make()
    prompt = prompts(bench)[3]
    plain = {"messages": None, "prompt_tokens": tuple(prompt)}
    bench.run([bench.submit((), replace(SCORED, logprobs=None), **plain)])
    first, again = (bench.run([score(bench, prompt)])[0] for _ in range(2))
    assert scores(first) == pytest.approx(scores(again), abs=NOISE)
    assert len(scores(again)) == len(prompt)  # of all but the first, and of the answer
    assert again.finished.timings.cache_n == 0
    (after,) = bench.run([bench.submit((), SCORED, **plain)])
    assert after.finished.timings.cache_n >= len(prompt) // 2
    assert len(after.logprobs) == 1


def test_preemption_scores_no_position_twice(make: Callable[..., LoadedBench]) -> None:
    roomy = make()
    text = roomy.model.tokenizer.encode(TEXT)
    asked = [text[at : at + 50] for at in range(6)]
    answers = replace(SCORED, max_tokens=40, ignore_eos=True)
    expected = [roomy.run([score(roomy, prompt, answers)])[0] for prompt in asked]
    bench = make(kv_tokens=256, ctx=128, parallel=6, max_batch_tokens=16)
    replies = bench.run([score(bench, prompt, answers) for prompt in asked])
    assert bench.stats.num_preemptions_total > 0
    for prompt, reply, reference in zip(asked, replies, expected, strict=True):
        assert [each.chosen.token_id for each in reply.logprobs[:50]] == prompt
        assert len(reply.logprobs) == 90
        assert scores(reply)[:50] == pytest.approx(scores(reference)[:50], abs=NOISE)


def test_a_prompt_alone(make: Callable[..., LoadedBench]) -> None:
    """max_tokens 0: no answer; the prompt may fill the context."""
    bench = make()
    only = replace(SCORED, max_tokens=0)
    for prompt in prompts(bench):
        (reply,) = bench.run([score(bench, prompt, only, ctx=len(prompt))])
        assert reply.finished.reason == "length"
        assert reply.finished.completion_tokens == 0
        assert reply.tokens == prompt
        (text,) = bench.run([score(bench, prompt, replace(only, logprobs=None))])
        assert text.logprobs == []
        assert text.text == reply.text
        assert text.text or len(prompt) == 1


def test_penalties_grammars_and_temperature_do_not_change_them(
    make: Callable[..., LoadedBench],
) -> None:
    bench = make()
    prompt = prompts(bench)[3]
    edited = replace(
        SCORED, temperature=1.5, repeat_penalty=1.5, regex="[0-9]+", logit_bias={prompt[3]: -50.0}
    )
    plain, reply = bench.run([score(bench, prompt), score(bench, prompt, edited)])
    assert scores(reply)[: len(prompt) - 1] == pytest.approx(
        scores(plain)[: len(prompt) - 1], abs=NOISE
    )
    answer = reply.logprobs[-1].chosen.text
    assert answer.strip().isdigit()


def test_what_makes_no_sense_is_refused(make: Callable[..., LoadedBench]) -> None:
    bench = make()
    none = replace(SCORED, max_tokens=0)
    chat = (Message("user", "hello"),)
    names = [
        bench.submit(chat, SCORED, echo=True),
        bench.submit((), none, messages=None, prompt="hello"),
        score(bench, [1] * 9, ctx=8),
    ]
    bench.engine.step(wait=True)
    ends = [reply.end for reply in bench.run(names)]
    said = [end.message for end in ends if isinstance(end, Failed)]
    assert "not for messages" in said[0]
    assert "or 0 for a prompt with echo" in said[1]
    assert "the prompt is too long: 9 tokens, the context is 8" in said[2]
