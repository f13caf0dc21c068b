"""How much of a cached prefix is reused: all, except where recomputing a block is faster."""

from __future__ import annotations

import pytest
from models import TINY_GGUF, Bench

from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
from localgen.backends.llamacpp.slots import BLOCK_ROWS, PrefixReusePolicy
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message

# 1.2 B parameters, 16 layers of 2,048
LARGE = PrefixReusePolicy(16 * 2048 / 1.236e9)


@pytest.mark.parametrize(
    ("known", "rows", "computed"),
    [
        (0, 100, 100),  # nothing to reuse
        (1600, 1, 1),  # one row costs little
        (1600, 20, 20),
        (1600, 48, 64),  # measured: 950 ms against 662 ms
        (3900, 28, 64),  # 1,138 ms against 919 ms
        (3900, 20, 20),  # 809 ms
        (800, 40, 40),  # 497 ms against 545 ms
        (400, 60, 60),  # little context
        (1600, 64, 64),
        (1600, 90, 90),  # more than a block: as it is
    ],
)
def test_rows_are_computed_in_a_block_where_that_was_measured_to_be_faster(
    known: int, rows: int, computed: int
) -> None:
    assert known + rows - LARGE.reuse_tokens(known, known + rows) == computed


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        (LoadOptions(), True),
        (LoadOptions(cache_type_k="f32", cache_type_v="f32"), True),
        (LoadOptions(flash_attn="off"), False),
        (LoadOptions(cache_type_k="q8_0", cache_type_v="q8_0"), False),
        (LoadOptions(cache_type_k="f32", cache_type_v="f16"), False),
    ],
)
def test_blocks_are_for_some_caches_only(options: LoadOptions, blocks: bool) -> None:
    settings = resolve_llama_options(options)
    model = LlamaModel(TINY_GGUF, settings, lambda _share: None)
    assert bool(PrefixReusePolicy.for_model(model, settings).attention_cost) == blocks
    model.close()


@pytest.mark.parametrize("unified", [True, False])
def test_a_long_chat_goes_on_in_a_block_with_the_same_text(unified: bool) -> None:
    long = Message("user", "What is a KV cache? " * 120)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    fresh = Bench(LoadOptions(prefix_cache=False))
    bench = Bench(LoadOptions(kv_unified=unified, parallel=4))
    (first,) = bench.ask([[long]], greedy)
    chat = [long, Message("assistant", first.text), Message("user", "And what is 17 + 25? " * 4)]
    (second,) = bench.ask([chat], greedy)
    timings = second.finished.timings
    assert timings.prompt_n == BLOCK_ROWS
    assert timings.cache_n == second.finished.prompt_tokens - BLOCK_ROWS
    assert second.text == fresh.ask([chat], greedy)[0].text
    assert bench.runner.usage().cached < first.finished.prompt_tokens + 150, "nothing kept twice"
    fresh.close()
    bench.close()


@pytest.mark.parametrize("unified", [True, False])
def test_only_requests_with_the_same_salt_share_a_prefix(unified: bool) -> None:
    chat = [Message("user", "What is a KV cache? " * 20)]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    bench = Bench(LoadOptions(kv_unified=unified, parallel=4, ctx=512))

    def cached_tokens(salt: str) -> int:
        (reply,) = bench.run([bench.submit(chat, greedy, cache_salt=salt)])
        return reply.finished.timings.cache_n

    assert [cached_tokens(salt) for salt in ("", "one", "two")] == [0, 0, 0]
    bench.check()
    assert all(cached_tokens(salt) > 50 for salt in ("", "one", "two"))
    running = [bench.submit(chat, greedy, cache_salt=salt) for salt in ("three", "four")]
    assert [reply.finished.timings.cache_n for reply in bench.run(running)] == [0, 0]
    bench.close()


@pytest.mark.parametrize("busy", [0, 3])
@pytest.mark.parametrize("unified", [True, False])
def test_a_background_request_leaves_the_prefix_that_it_continued(unified: bool, busy: int) -> None:
    chat = [Message("user", "What is a KV cache? " * 20)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    bench = Bench(LoadOptions(kv_unified=unified, parallel=4, ctx=512))
    (first,) = bench.ask([chat], greedy)
    chat += [Message("assistant", first.text), Message("user", "And what is 17 + 25? " * 4)]
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    others = [bench.submit([Message("user", f"{n} " * 9)], long) for n in range(busy)]
    (line,) = bench.run([bench.submit(chat, greedy, priority=-1)])
    bench.check()
    (again,) = bench.run([bench.submit(chat, greedy)])
    assert again.finished.timings.cache_n == line.finished.timings.cache_n > 100
    assert again.text == line.text
    bench.run(others)
    bench.close()


def test_what_a_prompt_does_not_share_is_evicted_by_age() -> None:
    """A common beginning protects itself, not the whole prompt that it is of."""
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    bench = Bench(LoadOptions(kv_tokens=1024, ctx=1024))

    def cached_tokens(*words: str) -> int:
        chat = [Message("user", " ".join(words))]
        (reply,) = bench.run([bench.submit(chat, greedy)])
        bench.check()
        return reply.finished.timings.cache_n

    oldest, newer = ("red " * 350, "blue " * 350)
    cached_tokens(oldest)
    cached_tokens(newer)
    assert 0 < cached_tokens("green " * 350) < 20, "the template"
    assert cached_tokens(newer) > 300, "the oldest made room"
    bench.close()
