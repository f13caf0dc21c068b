"""The CUDA runner on the CPU gives llama.cpp's text, which depends on the prompt only.

Both backends add in another order and precision. Where the two best logits lie closer than
NOISE, either may win; such cases are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models import Bench, LoadedBench, Reply, noisy, questions
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.loader import load_cuda_model
from localgen.backends.cuda.model.batch import StepInputs
from localgen.backends.cuda.runner import CudaRunner
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor, PreviousStepTokens
from localgen.backends.cuda.steps.run_ahead import next_step_inputs
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams

TINY = Path(__file__).parents[1] / "localgen/models/tiny"
# llama.cpp keeps keys, values and some products in 16 bits: logits differ by up to this
NOISE = 0.05
MAX_NOISY = 1  # of 20 answers
GREEDY = SamplingParams(temperature=0, max_tokens=60, logprobs=2)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=25, logprobs=2, seed=7, ignore_eos=True)
CHATS = questions(20)


def look_ahead(runner: CudaRunner, does: bool) -> None:
    """Set whether steps are launched ahead."""
    runner.limits = replace(runner.limits, runs_ahead=does)


class CudaBench(LoadedBench):
    """The built-in model in the CUDA runner, on the CPU.

    as_on_gpu: steps are padded to shapes and launched ahead, as on a GPU.
    """

    def __init__(
        self, *, as_on_gpu: bool = False, drafters: Sequence[Drafter] = (), **options: object
    ) -> None:
        asked = LoadOptions(backend="cuda", device="cpu", **options)  # type: ignore[arg-type]
        model = load_cuda_model(ModelLoadRequest("tiny", str(TINY), asked), lambda _share: None)
        assert isinstance(model.runner, CudaRunner)
        self.runner = model.runner
        look_ahead(self.runner, as_on_gpu)
        super().__init__(model, drafters)
        assert isinstance(self.runner._executor, DeviceExecutor)
        self.runner._executor._use_cuda_graphs = as_on_gpu

    def check(self) -> None:
        self.runner.kv_cache.check()


@pytest.fixture(scope="module")
def alone() -> Iterator[list[Reply]]:
    """Each chat by itself, in one chunk, with an empty cache."""
    bench = CudaBench(prefix_cache=False)
    yield bench.ask_one_by_one(CHATS, GREEDY)
    bench.close()


def test_greedy_text_equals_the_llama_cpp_backends(alone: list[Reply]) -> None:
    bench = Bench(LoadOptions())
    theirs = bench.ask_one_by_one(CHATS, GREEDY)
    bench.close()
    assert noisy(alone, theirs, NOISE) <= MAX_NOISY
    assert sum(len(reply.tokens) for reply in alone) > 200, "there is something to compare"


def test_text_does_not_depend_on_batch_mates(alone: list[Reply]) -> None:
    bench = CudaBench()
    assert noisy(bench.ask(CHATS, GREEDY), alone, NOISE) <= MAX_NOISY
    assert len(bench.stats.step_sequences) > 8, "many sequences were computed at once"
    bench.close()


@pytest.mark.parametrize("tokens", [3, 17])
def test_text_does_not_depend_on_chunk_size(tokens: int, alone: list[Reply]) -> None:
    bench = CudaBench(parallel=3, max_batch_tokens=tokens)
    assert noisy(bench.ask(CHATS, GREEDY), alone, NOISE) <= MAX_NOISY
    bench.close()


def test_text_does_not_depend_on_cache_hits(alone: list[Reply]) -> None:
    bench = CudaBench()
    bench.ask(CHATS, GREEDY)
    again = bench.ask(CHATS, GREEDY)
    assert noisy(again, alone, NOISE) <= MAX_NOISY
    for reply in again:
        # whole pages, and at least one token is left to compute
        prompt = reply.finished.prompt_tokens
        assert reply.finished.timings.cache_n == (prompt - 1) // 16 * 16
    bench.close()


LONG = SamplingParams(temperature=0, max_tokens=90, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def undisturbed() -> list[Reply]:
    """Long answers in a pool that holds them all."""
    bench = CudaBench()
    replies = bench.ask(CHATS[:8], LONG)
    assert bench.stats.num_preemptions_total == 0
    bench.close()
    return replies


def test_text_does_not_depend_on_preemption(undisturbed: list[Reply]) -> None:
    crowded = CudaBench(ctx=160, kv_tokens=400)
    assert noisy(crowded.ask(CHATS[:8], LONG), undisturbed, NOISE) <= MAX_NOISY
    assert crowded.stats.num_preemptions_total > 0, "the pool was too small for all"
    crowded.close()


def test_sampled_text_depends_on_the_seed_alone() -> None:
    bench = CudaBench()
    one_by_one = bench.ask_one_by_one(CHATS[:8], SAMPLED)
    at_once = bench.ask(CHATS[:8], SAMPLED)
    same = sum(a.tokens == b.tokens for a, b in zip(one_by_one, at_once, strict=True))
    assert same >= 7, "a draw right at the border between two tokens may go either way"
    other = bench.ask(CHATS[:8], SamplingParams(temperature=0.8, max_tokens=40, seed=8, logprobs=2))
    assert any(a.tokens != b.tokens for a, b in zip(other, at_once, strict=True))
    bench.close()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_cache_in_eight_bits(kind: str, alone: list[Reply]) -> None:
    """Not the same text, but correct answers to simple questions."""
    bench = CudaBench(cache_type_k=kind, cache_type_v=kind)
    replies = bench.ask(CHATS, GREEDY)
    same = sum(a.text == b.text for a, b in zip(replies, alone, strict=True))
    assert same >= {"int8": 17, "fp8": 12}[kind], same
    bench.close()


PLAIN = SamplingParams(temperature=0, max_tokens=60)


def texts(replies: Sequence[Reply]) -> list[str]:
    return [reply.text for reply in replies]


def test_steps_launched_ahead_change_nothing(alone: list[Reply]) -> None:
    """Sequences end, join and wait while a step is launched ahead."""
    bench = CudaBench(as_on_gpu=True, parallel=6)
    asked = [bench.submit(chat, PLAIN) for chat in CHATS]
    replies = bench.run(asked)
    different = sum(a != b for a, b in zip(texts(replies), texts(alone), strict=True))
    assert different <= MAX_NOISY
    bench.close()


def test_steps_launched_ahead_and_preemption(undisturbed: list[Reply]) -> None:
    crowded = CudaBench(as_on_gpu=True, ctx=160, kv_tokens=400)
    replies = texts(crowded.ask(CHATS[:8], replace(LONG, logprobs=None)))
    assert sum(a != b for a, b in zip(replies, texts(undisturbed), strict=True)) <= MAX_NOISY
    assert crowded.stats.num_preemptions_total > 0, "the pool was too small for all"
    crowded.close()


def test_a_step_launched_ahead_is_used() -> None:
    """One step per token, and one unused at the end."""
    bench = CudaBench(as_on_gpu=True)
    rows: list[int] = []
    run = bench.runner._executor.run

    def counted(inputs: StepInputs, token_source: PreviousStepTokens | None = None) -> Tensor:
        rows.append(len(inputs.tokens))
        return run(inputs, token_source)

    bench.runner._executor.run = counted  # type: ignore[method-assign]
    (reply,) = bench.ask(CHATS[:1], PLAIN)
    prompt, answer = reply.finished.prompt_tokens, reply.finished.completion_tokens
    assert sum(rows) in (prompt + answer, prompt + answer + 1)
    bench.close()


def test_no_memory_for_a_step_ahead_costs_only_that_step(alone: list[Reply]) -> None:
    bench = CudaBench(as_on_gpu=True)
    run, refused = bench.runner._executor.run, 0

    def without_steps_ahead(
        inputs: StepInputs, token_source: PreviousStepTokens | None = None
    ) -> Tensor:
        nonlocal refused
        if token_source is not None:
            refused += 1
            raise torch.OutOfMemoryError
        return run(inputs, token_source)

    bench.runner._executor.run = without_steps_ahead  # type: ignore[method-assign]
    (reply,) = bench.ask(CHATS[:1], PLAIN)
    assert refused > 1
    assert reply.text == alone[0].text
    assert bench.stats.num_preemptions_total == 0
    bench.close()


def test_a_step_ahead_takes_only_the_pages_it_needs() -> None:
    """A step with drafts that found no room leaves a table with pages for them."""
    pages = np.arange(3, 9, dtype=np.int32)[None]
    step = next_step_inputs([19], lambda num_pages: pages[:, :num_pages], [0])
    assert step.page_tables.tolist() == [[3, 4]]
    assert step.slot_mapping.tolist() == [4 * PAGE_TOKENS + 4]


def test_cancelled_while_a_step_is_ahead() -> None:
    bench = CudaBench(as_on_gpu=True)
    endless = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    stays, goes = (bench.submit(chat, endless) for chat in CHATS[:2])
    while not bench.replies[goes].text:
        bench.engine.step(wait=False)
    bench.engine.cancel(goes)
    bench.run([goes])
    # takes the pages that became free while a step was ahead
    (answer,) = bench.ask(CHATS[2:3], PLAIN)
    assert answer.text == CudaBench().ask(CHATS[2:3], PLAIN)[0].text
    bench.engine.cancel(stays)
    bench.run([stays])
    bench.close()


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_an_answer_held_to_a_grammar(as_on_gpu: bool) -> None:
    bench = CudaBench(as_on_gpu=as_on_gpu)
    held = SamplingParams(temperature=1.0, max_tokens=60, seed=3, regex=r"[a-f]{3}-\d{2,4}")
    names = [bench.submit(chat, held) for chat in CHATS[:6]]
    free = bench.submit(CHATS[6], PLAIN)
    for reply in bench.run(names):
        assert re.fullmatch(r"[a-f]{3}-\d{2,4}", reply.text)
        assert reply.finished.reason == "stop"
    assert bench.run([free])[0].text == CudaBench().ask([CHATS[6]], PLAIN)[0].text
    bench.close()


def test_steps_with_requests_of_every_kind_are_launched_ahead() -> None:
    kinds = [
        PLAIN,
        replace(PLAIN, logprobs=2),
        replace(PLAIN, repeat_penalty=1.3, repeat_last_n=32, frequency_penalty=0.2),
        SamplingParams(temperature=1.0, max_tokens=60, seed=3, regex=r"[a-f]{3}-\d{2,4}"),
        replace(PLAIN, min_tokens=20),
        SAMPLED,
    ]
    plain, bench = CudaBench(), CudaBench(as_on_gpu=True)
    ahead: list[bool] = []
    run = bench.runner._executor.run

    def counted(inputs: StepInputs, token_source: PreviousStepTokens | None = None) -> Tensor:
        ahead.append(token_source is not None)
        return run(inputs, token_source)

    bench.runner._executor.run = counted  # type: ignore[method-assign]
    expected, replies = (
        each.run([each.submit(chat, kind) for chat, kind in zip(CHATS, kinds, strict=False)])
        for each in (plain, bench)
    )
    different = sum(a != b for a, b in zip(texts(replies), texts(expected), strict=True))
    assert different <= MAX_NOISY
    assert [len(reply.logprobs) for reply in replies] == [len(r.logprobs) for r in expected]
    # the prompts, which arrive one by one, and the token after each
    assert ahead.count(False) <= 2 * len(kinds) < ahead.count(True)
    plain.close()
    bench.close()


def test_statistics_have_the_size_of_a_page() -> None:
    bench = CudaBench()
    bench.ask_one_by_one(CHATS[:1], GREEDY)
    stats = bench.stats
    assert stats.kv_page_tokens == PAGE_TOKENS
    assert stats.kv_tokens % PAGE_TOKENS == 0 < stats.kv_tokens
    bench.close()
