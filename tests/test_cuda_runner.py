"""The CUDA runner on CPU tensors, on the built-in model: the same text as llama.cpp, and text that
depends on the prompt and nothing else.

Both compute the same sums in another order and precision. Where the two best logits lie closer
together than NOISE, either may win; such cases are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from models import Bench, LoadedBench, Reply, questions

from localgen.backends.cuda.load import load
from localgen.backends.cuda.runner import CudaRunner
from localgen.backends.engine.wire import Load
from localgen.backends.types import LoadOptions, SamplingParams

TINY = Path(__file__).parents[1] / "localgen/models/tiny"
# llama.cpp keeps keys, values and some products in 16 bits: logits differ by up to this
NOISE = 0.05
MAX_NOISY = 1  # of 20 answers
GREEDY = SamplingParams(temperature=0, max_tokens=60, logprobs=2)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=40, logprobs=2, seed=7, ignore_eos=True)
CHATS = questions(20)


class CudaBench(LoadedBench):
    """The built-in model in the CUDA runner, on the CPU."""

    def __init__(self, **options: object) -> None:
        asked = LoadOptions(backend="cuda", device="cpu", **options)  # type: ignore[arg-type]
        super().__init__(load(Load("tiny", str(TINY), asked), lambda _share: None))
        assert isinstance(self.model.runner, CudaRunner)
        self.runner = self.model.runner

    def check(self) -> None:
        self.runner.room.check()


@pytest.fixture(scope="module")
def alone() -> Iterator[list[Reply]]:
    """Each chat by itself, in one chunk, with an empty cache."""
    bench = CudaBench(prefix_cache=False)
    yield bench.ask_one_by_one(CHATS, GREEDY)
    bench.close()


def noisy(replies: Sequence[Reply], references: Sequence[Reply]) -> int:
    """Number of answers that differ; asserts that each could: two logits within NOISE."""
    count = 0
    for reply, reference in zip(replies, references, strict=True):
        if reply.tokens == reference.tokens:
            assert reply.text == reference.text
            continue
        pairs = zip(reply.tokens, reference.tokens, strict=False)
        at = next(i for i, (a, b) in enumerate(pairs) if a != b)
        best, second = reference.logprobs[at].top
        assert best.logprob - second.logprob < NOISE, (reply.text, reference.text)
        assert reply.tokens[at] in (best.token_id, second.token_id)
        count += 1
    return count


def test_greedy_text_equals_the_llama_cpp_backends(alone: list[Reply]) -> None:
    bench = Bench(LoadOptions())
    theirs = bench.ask_one_by_one(CHATS, GREEDY)
    bench.close()
    assert noisy(alone, theirs) <= MAX_NOISY
    assert sum(len(reply.tokens) for reply in alone) > 200, "there is something to compare"


def test_text_does_not_depend_on_batch_mates(alone: list[Reply]) -> None:
    bench = CudaBench()
    assert noisy(bench.ask(CHATS, GREEDY), alone) <= MAX_NOISY
    assert len(bench.stats.step_sequences) > 8, "many sequences were computed at once"
    bench.close()


@pytest.mark.parametrize("tokens", [3, 17])
def test_text_does_not_depend_on_chunk_size(tokens: int, alone: list[Reply]) -> None:
    bench = CudaBench(parallel=3, max_batch_tokens=tokens)
    assert noisy(bench.ask(CHATS, GREEDY), alone) <= MAX_NOISY
    bench.close()


def test_text_does_not_depend_on_cache_hits(alone: list[Reply]) -> None:
    bench = CudaBench()
    bench.ask_one_by_one(CHATS, GREEDY)
    again = bench.ask_one_by_one(CHATS, GREEDY)
    assert noisy(again, alone) <= MAX_NOISY
    for reply in again:
        # whole pages, and a token is left to compute
        prompt = reply.finished.prompt_tokens
        assert reply.finished.timings.cache_n == (prompt - 1) // 16 * 16
    bench.close()


def test_text_does_not_depend_on_preemption() -> None:
    long = SamplingParams(temperature=0, max_tokens=90, logprobs=2, ignore_eos=True)
    undisturbed, crowded = CudaBench(), CudaBench(ctx=160, kv_tokens=400)
    references = undisturbed.ask_one_by_one(CHATS[:8], long)
    assert noisy(crowded.ask(CHATS[:8], long), references) <= MAX_NOISY
    assert crowded.stats.num_preemptions_total > 0, "the pool was too small for all"
    undisturbed.close()
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
    """Not the same text, but the same answers to simple questions."""
    bench = CudaBench(cache_type_k=kind, cache_type_v=kind)
    replies = bench.ask(CHATS, GREEDY)
    same = sum(a.text == b.text for a, b in zip(replies, alone, strict=True))
    assert same >= {"int8": 17, "fp8": 12}[kind], same
    bench.close()
