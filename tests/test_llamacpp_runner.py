"""The llama.cpp runner on the built-in model: text depends on the prompt only.

Batches of another shape add up in another order, so logits differ by rounding. Where the two
best lie closer together than NOISE, either may win; such cases are counted.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import llama_cpp.llama_cpp as C
import numpy as np
import psutil
import pytest
from models import TINY_GGUF, Bench, Reply, moved, noisy, questions

from localgen.backends.llamacpp.devices import list_devices
from localgen.backends.llamacpp.free_cores import FreeCores
from localgen.backends.llamacpp.runner import LlamaStepTicket
from localgen.backends.model_info import LoadOptions
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence as EngineSequence
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Finished, Message

# logits of this model are of order 10; f16 KV and float32 sums leave differences of 1e-3
NOISE = 0.02
MAX_NOISY = 2  # of 40 answers

GREEDY = SamplingParams(temperature=0, max_tokens=100, logprobs=2)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=80, logprobs=2, seed=7, ignore_eos=True)
CHATS = questions(40)


UNIFIED = LoadOptions()
IN_PARTS = LoadOptions(kv_unified=False, parallel=32, ctx=512)


@pytest.fixture(params=[UNIFIED, IN_PARTS], ids=["unified", "in_parts"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def alone() -> list[Reply]:
    """Each chat by itself, in one chunk, with an empty cache."""
    bench = Bench(LoadOptions(prefix_cache=False))
    replies = bench.ask_one_by_one(CHATS, GREEDY)
    bench.close()
    return replies


def bare_greedy(prompt: Sequence[int], most: int, ends: frozenset[int]) -> list[int]:
    """Plain llama.cpp without localgen: one sequence, one token at a time."""
    model = C.llama_model_load_from_file(str(TINY_GGUF).encode(), C.llama_model_default_params())
    context = C.llama_init_from_model(model, C.llama_context_default_params())
    vocab_size = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    tokens, new = list(prompt), list(prompt)
    while len(tokens) - len(prompt) < most:
        array = (ctypes.c_int32 * len(new))(*new)
        assert C.llama_decode(context, C.llama_batch_get_one(array, len(new))) == 0
        row = np.ctypeslib.as_array(C.llama_get_logits_ith(context, -1), (vocab_size,))
        new = [int(row.argmax())]
        tokens += new
        if new[0] in ends:
            break
    C.llama_free(context)
    C.llama_model_free(model)
    return tokens[len(prompt) :]


def test_greedy_text_equals_plain_llama_cpp(bench: Bench, alone: list[Reply]) -> None:
    tokenizer, template = bench.model.tokenizer, bench.model.template
    assert template is not None
    for chat, reply in zip(CHATS[:12], alone, strict=False):
        prompt = tokenizer.encode(template.render(chat))
        assert reply.tokens == bare_greedy(prompt, 100, tokenizer.eos_token_ids)


def test_text_does_not_depend_on_batch_mates(bench: Bench, alone: list[Reply]) -> None:
    assert noisy(bench.ask(CHATS, GREEDY), alone, NOISE) <= MAX_NOISY
    assert len(bench.stats.step_sequences) > 8, "many sequences went into one llama_decode"


@pytest.mark.parametrize("tokens", [4, 33])
def test_text_does_not_depend_on_chunk_size(tokens: int, alone: list[Reply]) -> None:
    bench = Bench(LoadOptions(parallel=4, max_batch_tokens=tokens))
    assert noisy(bench.ask(CHATS, GREEDY), alone, NOISE) <= MAX_NOISY
    bench.close()


def test_text_does_not_depend_on_cache_hits(bench: Bench, alone: list[Reply]) -> None:
    chats = CHATS[:25]  # fewer than the prefixes that are kept
    bench.ask(chats, GREEDY)
    before = bench.stats.prefix_cache_hits_total
    again = bench.ask_one_by_one(chats, GREEDY)
    assert noisy(again, alone[:25], NOISE) <= MAX_NOISY
    prompt_tokens = sum(reply.finished.prompt_tokens for reply in again)
    cached = sum(reply.finished.timings.cache_n for reply in again)
    assert cached == bench.stats.prefix_cache_hits_total - before
    assert cached == prompt_tokens - len(chats), "all but the token that starts the answer"
    bench.runner.kv_cache.check()


def squeezed() -> Bench:
    """A pool in which eight long answers do not fit."""
    return Bench(LoadOptions(parallel=8, ctx=256, kv_tokens=256))


def test_text_does_not_depend_on_preemption(bench: Bench) -> None:
    params = replace(GREEDY, ignore_eos=True)
    references = bench.ask(CHATS[:16], params)
    assert bench.stats.num_preemptions_total == 0
    small = squeezed()
    replies = small.ask(CHATS[:16], params)
    assert small.stats.num_preemptions_total > 0
    assert noisy(replies, references, NOISE) <= MAX_NOISY
    assert any("preempted" in note for reply in replies for note in reply.finished.notes)
    small.close()


def test_sampled_text_depends_on_the_seed_alone(bench: Bench) -> None:
    references = bench.ask_one_by_one(CHATS[:16], SAMPLED)
    small = squeezed()
    for other in (bench, small):
        replies = other.ask(CHATS[:16], SAMPLED)
        assert moved(replies, references, NOISE) <= MAX_NOISY
    assert small.stats.num_preemptions_total > 0
    small.close()
    different = bench.ask(CHATS[:16], replace(SAMPLED, seed=8))
    assert [r.text for r in different] != [r.text for r in references]


def test_drafts_change_nothing(bench: Bench, alone: list[Reply]) -> None:
    """1 + k tokens in one chunk: right drafts are accepted, wrong ones rewound."""
    rng = random.Random(3)
    scheduler = bench.engine._scheduler
    answers: dict[str, list[int]] = {}
    plan = scheduler.plan

    def plan_with_drafts() -> object:
        for seq in scheduler.running:
            if seq.is_decoding:
                seq.drafts = guess(seq, answers[seq.id], rng)
        return plan()

    scheduler.plan = plan_with_drafts  # type: ignore[method-assign, assignment]
    names = []
    for chat, reply in zip(CHATS, alone, strict=True):
        names.append(bench.submit(chat, GREEDY))
        answers[names[-1]] = reply.tokens
    assert noisy(bench.run(names), alone, NOISE) <= MAX_NOISY
    generated = bench.stats.generation_tokens_total
    rows = sum(n * steps for n, steps in enumerate(bench.stats.step_sequences))
    assert rows < 0.8 * generated, "accepted drafts save steps"


def guess(seq: EngineSequence, answer: list[int], rng: random.Random) -> list[int]:
    done = seq.num_generated
    right = answer[done : done + rng.randint(0, 3)]
    return [*right, *(rng.randrange(4096) for _ in range(rng.randint(0, 2)))]


def test_the_second_turn_computes_only_what_is_new(bench: Bench) -> None:
    chat = [Message("user", "What is a KV cache?")]
    (first,) = bench.ask([chat], GREEDY)
    chat += [Message("assistant", first.text), Message("user", "What is 17 + 25?")]
    (second,) = bench.ask([chat], GREEDY)
    timings = second.finished.timings
    # all of the first turn but its end token, which was sampled and never computed
    assert timings.cache_n == first.finished.prompt_tokens + first.finished.completion_tokens - 1
    assert timings.prompt_n == second.finished.prompt_tokens - timings.cache_n
    assert timings.prompt_n < 30


def test_four_cold_requests_compute_their_system_prompt_once(bench: Bench) -> None:
    system = Message("system", "You are a helpful machine. " * 60)
    chats = [[system, Message("user", f"What is {i} + 2?")] for i in range(4)]
    replies = bench.ask(chats, GREEDY)
    computed = sum(reply.finished.timings.prompt_n for reply in replies)
    prompt = min(reply.finished.prompt_tokens for reply in replies)
    assert prompt > 300
    assert computed < prompt + 4 * 32


@pytest.mark.parametrize("options", [LoadOptions(kv_tokens=1024), LoadOptions(kv_unified=False)])
def test_200_requests_with_random_cancels_leave_the_pool_whole_and_memory_flat(
    options: LoadOptions,
) -> None:
    bench = Bench(replace(options, parallel=8, ctx=512, max_batch_tokens=64))
    rng = random.Random(1)
    process = psutil.Process()
    resident = []
    for _ in range(8):
        names = []
        for _ in range(25):
            words = " ".join(rng.choices(["cat", "sum", "17", "blue"], k=rng.randint(1, 80)))
            length, seed = rng.randint(1, 40), rng.randrange(99)
            params = SamplingParams(temperature=1, max_tokens=length, seed=seed)
            names.append(bench.submit([Message("user", words)], params))
            if rng.random() < 0.5:
                bench.engine.step(wait=False)
            if rng.random() < 0.3:
                bench.engine.cancel(rng.choice(names))
        bench.run(names)
        bench.runner.kv_cache.check()
        resident.append(process.memory_info().rss)
    ends = [reply.end for reply in bench.replies.values()]
    assert len(ends) == 200
    assert all(isinstance(end, Finished) for end in ends)
    assert sum(isinstance(end, Finished) and end.reason == "cancelled" for end in ends) > 20
    assert resident[-1] - resident[4] < 8e6, "memory is flat once warm"
    bench.close()


def test_without_prefix_cache_nothing_is_reused() -> None:
    bench = Bench(LoadOptions(prefix_cache=False))
    for _ in range(2):
        (reply,) = bench.ask([CHATS[0]], GREEDY)
        assert reply.finished.timings.cache_n == 0
    assert bench.runner.usage().cached == 0
    bench.close()


def test_parts_hold_a_whole_context_each() -> None:
    bench = Bench(LoadOptions(kv_unified=False, ctx=300, parallel=3))
    assert (bench.model.info.ctx, bench.model.info.kv_tokens) == (300, 3 * 512)
    assert bench.model.info.options.kv_unified is False
    long = replace(GREEDY, max_tokens=250, ignore_eos=True)
    replies = bench.ask(CHATS[:6], long)
    assert bench.stats.num_preemptions_total == 0
    assert {reply.finished.completion_tokens for reply in replies} == {250}
    bench.close()


def test_a_seed_gives_the_same_text_in_every_part() -> None:
    bench = Bench(LoadOptions(kv_unified=False, parallel=4, ctx=512, threads=2))
    params = SamplingParams(temperature=1, seed=5, max_tokens=60, ignore_eos=True, logprobs=3)
    replies = []
    for number in range(4):
        name = bench.submit(CHATS[0], params, cache_salt=str(number))  # nothing is reused
        replies += bench.run([name])
    assert replies[0].finished.completion_tokens == 60
    assert all(reply.logprobs == replies[0].logprobs for reply in replies)
    bench.close()


def test_statistics_tell_how_many_threads_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreeCores, "count", lambda _: 1)
    bench = Bench(UNIFIED)
    bench.ask(CHATS[:1], replace(GREEDY, max_tokens=3))
    assert (bench.stats.threads, bench.stats.threads_max) == (1, bench.model.info.options.threads)
    bench.close()


def test_parts_move_together_where_a_finished_one_left_a_gap() -> None:
    """Texts of different lengths end one by one; the others stay in one llama_decode call."""
    bench = Bench(LoadOptions(kv_unified=False, parallel=8, ctx=512))
    lengths = [5, 90, 10, 80, 15, 70, 20, 60]
    references = bench.ask_one_by_one(CHATS[:8], replace(GREEDY, max_tokens=90, ignore_eos=True))
    indices: list[list[int]] = []
    launch = bench.runner.launch

    def spy(chunks: Sequence[Chunk]) -> LlamaStepTicket:
        ticket = launch(chunks)
        indices.append(sorted(bench.runner.kv_cache.seq_id_of(chunk.seq) for chunk in chunks))
        return ticket

    bench.runner.launch = spy  # type: ignore[method-assign]
    names = [
        bench.submit(chat, replace(GREEDY, max_tokens=length, ignore_eos=True))
        for chat, length in zip(CHATS, lengths, strict=False)
    ]
    replies = bench.run(names)
    assert len({len(step) for step in indices}) > 4, "the batch shrank"
    for step in indices:
        assert step == list(range(step[0], step[0] + len(step))), step
    cut = [
        replace(reference, logprobs=reference.logprobs[:length], text=reply.text)
        for reference, reply, length in zip(references, replies, lengths, strict=True)
    ]
    assert noisy(replies, cut, NOISE) <= MAX_NOISY
    bench.close()


def test_devices_report_their_memory() -> None:
    cpu = next(device for device in list_devices() if device.kind == "cpu")
    assert 0 < cpu.free_bytes <= cpu.total_bytes
    assert cpu.total_bytes == pytest.approx(psutil.virtual_memory().total, rel=0.2)
