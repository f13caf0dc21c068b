"""llama.cpp's keys and values come back from RAM and disk exactly as they were computed."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf_files import rewrite
from models import TINY_GGUF, Bench, Reply, noisy
from numpy.typing import NDArray
from serving import wait_until

from localgen.backends.engine import prefix_tiers
from localgen.backends.engine.prefix_tiers import PrefixTiers
from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.kv_store import writer
from localgen.backends.kv_store.blocks import KVBlock
from localgen.backends.kv_store.disk_tier import DiskTier, namespace_folders, stored_files
from localgen.backends.kv_store.inventory import remove_model, stored_models
from localgen.backends.llamacpp import kv_tiers
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.llamacpp.shared_cache import SharedCache
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message

PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True)
DISK = LoadOptions(kv_ram=0)
NOISE = 0.02  # of the logits of this model


def text(seed: int, words: int) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choice(["red", "blue", "seven", "house"]) for _ in range(words))


HEAD = text(1, 700)


def chat(*messages: str) -> list[Message]:
    return [Message(role="user", content="\n".join(messages))]


def end(bench: Bench) -> None:
    bench.engine.save_prefixes(time.monotonic() + 30)
    bench.close()


def assert_same(one: Reply, other: Reply) -> None:
    """Same tokens with the very same probabilities."""
    assert one.text == other.text
    assert one.logprobs == other.logprobs


def assert_stored_states(bench: Bench, num_restored: int) -> None:
    """What was restored of HEAD is in the KV cache as it is in the store, bit by bit."""
    cache, store = bench.runner.kv_cache, bench.model.prefix_store
    assert isinstance(cache, SharedCache)
    assert store is not None
    (slot,) = [each for each in cache._cached_prefixes if not each.cache_salt]
    found = store.find(slot.cached_tokens[:num_restored], "")[:-1]  # the last one in part
    assert len(found) > 3
    for block in found:
        loaded = store.load(block, slot.cached_tokens)
        assert loaded is not None
        end = block.start + len(loaded[0].tokens)
        state = cache._context.save_range(slot.seq_id, cache._scratch_id, block.start, end)
        assert in_order(state) == in_order(loaded[0].state)


def in_order(state: NDArray[np.uint8]) -> list[bytes]:
    """The keys, then the values of each layer by position; llama.cpp writes them by cell."""
    content = state.tobytes()
    _, _, streams, cells = struct.unpack_from("<4I", content)
    assert streams == 1
    at = 16
    positions = [struct.unpack_from("<I", content, at + 12 * cell)[0] for cell in range(cells)]
    order = sorted(range(cells), key=positions.__getitem__)
    at += 12 * cells
    is_transposed, layers = struct.unpack_from("<2I", content, at)
    assert not is_transposed
    at += 8
    parts = []
    for _ in range(2 * layers):
        _, size = struct.unpack_from("<iQ", content, at)
        at += 12
        rows = [content[at + size * cell : at + size * (cell + 1)] for cell in order]
        parts.append(b"".join(rows))
        at += size * cells
    assert at == len(content)
    return [str(sorted(positions)).encode(), *parts]


@pytest.fixture(scope="module")
def reused() -> Reply:
    """The answer over a prefix in the KV cache."""
    bench = Bench(LoadOptions(prefix_cache=True))
    bench.ask([chat(HEAD)], PARAMS)
    (reply,) = bench.ask([chat(HEAD)], PARAMS)
    bench.close()
    return reply


def test_the_time_saved_is_that_of_whole_prompts(tmp_path: Path) -> None:
    """Although steps of a few prompt tokens, which take longer for each, came last."""
    bench = Bench(LoadOptions(kv_disk=0), kv_dir=tmp_path)
    bench.ask([chat(HEAD)], PARAMS)
    store = bench.model.prefix_store
    assert store is not None
    bench.engine._flush(idle=True)
    whole_per_s = store.prefill_per_s
    for _ in range(20):
        bench.ask([chat(HEAD)], PARAMS)
    bench.engine._flush(idle=True)
    assert store.prefill_per_s == pytest.approx(whole_per_s)
    bench.close()


def test_all_of_a_prompt_comes_back_into_a_full_cache(tmp_path: Path) -> None:
    """Its last block, which goes on with the answer, too."""
    bench = Bench(LoadOptions(kv_disk=0, kv_tokens=1536, ctx=1536), kv_dir=tmp_path)
    texts = [chat(text(seed, 900)) for seed in (2, 3)]
    for prompt in texts:
        bench.ask([prompt], PARAMS)
    for prompt in texts:
        (reply,) = bench.ask([prompt], PARAMS)
        timings = reply.finished.timings
        (restored,) = timings.restored
        assert restored.tokens > 200
        assert timings.prompt_n == 1, "computed, for the first token"
    end(bench)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_the_same_from_disk_after_a_restart(tmp_path: Path, kv_type: str) -> None:
    options = LoadOptions(kv_ram=0, cache_type_k=kv_type, cache_type_v=kv_type)
    first = Bench(options, kv_dir=tmp_path)
    first.ask([chat(HEAD)], PARAMS)
    (reused,) = first.ask([chat(HEAD)], PARAMS)
    assert reused.finished.timings.restored == ()
    end(first)
    again = Bench(options, kv_dir=tmp_path)
    (reply,) = again.ask([chat(HEAD)], PARAMS)
    assert_same(reply, reused)
    timings = reply.finished.timings
    (restored,) = timings.restored
    assert restored.tier == "disk"
    assert timings.cache_n == reused.finished.timings.cache_n
    assert timings.cache_n - 64 <= restored.tokens <= timings.cache_n
    (tier,) = again.stats.kv_tiers
    assert tier.hit_tokens_total == restored.tokens
    end(again)


def test_the_same_from_ram_after_eviction(tmp_path: Path, reused: Reply) -> None:
    bench = Bench(LoadOptions(kv_disk=0, kv_tokens=2048, ctx=2048), kv_dir=tmp_path)
    bench.ask([chat(HEAD)], PARAMS)
    for seed in (2, 3):  # take its room
        bench.run([bench.submit(chat(text(seed, 1200)), PARAMS, cache_salt=f"{seed}")])
    (reply,) = bench.ask([chat(HEAD)], PARAMS)
    (restored,) = reply.finished.timings.restored
    assert restored.tier == "ram"
    assert restored.tokens > 500
    # other cells of the KV cache: attention adds up in another order
    assert noisy([reply], [reused], NOISE) <= 1
    assert_stored_states(bench, restored.tokens)
    assert not list(tmp_path.iterdir()), "nothing is written without a disk tier"
    end(bench)


def test_a_prefix_in_the_kv_cache_is_not_loaded_again(tmp_path: Path) -> None:
    bench = Bench(DISK, kv_dir=tmp_path)
    bench.ask([chat(HEAD)], PARAMS)
    while bench.runner.save_next_block():
        pass
    (reply,) = bench.ask([chat(HEAD, "more")], PARAMS)
    assert reply.finished.timings.cache_n > 500
    assert reply.finished.timings.restored == ()
    end(bench)


def test_an_answer_goes_on_while_another_prompt_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reused: Reply
) -> None:
    first = Bench(DISK, kv_dir=tmp_path)
    first.ask([chat(HEAD)], PARAMS)
    end(first)
    monkeypatch.setattr(prefix_tiers, "LOAD_BESIDE_OTHERS_S", 0.0)  # a block in each step
    again = Bench(DISK, kv_dir=tmp_path)
    running = again.submit(chat("Hello"), PARAMS)
    scheduler = again.engine._scheduler
    while not any(seq.num_generated for seq in scheduler.running):
        again.engine.step(wait=False)
    (talking,) = scheduler.running
    loading = again.submit(chat(HEAD), PARAMS)
    seen: list[tuple[int, int, int]] = []
    while not seen or seen[-1][0] < seen[-1][2]:
        again.engine.step(wait=False)
        again.runner.kv_cache.check()
        other = [seq for seq in scheduler.running if seq is not talking]
        seen += [(s.num_computed, talking.num_generated, s.num_prompt) for s in other]
    steps = [step for step in seen if step[0] < step[2] - 64]
    assert len(steps) >= 4, "a step for each block but the last"
    for (before, said, _), (after, says, _) in itertools.pairwise(steps):
        assert (after - before, says - said) == (128, 1)
    _, reply = again.run([running, loading])
    assert noisy([reply], [reused], NOISE) <= 1
    end(again)


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_is_evicted_is_saved_first(
    is_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an answer too."""
    monkeypatch.setattr(PrefixTiers, "save_while_busy", lambda _: None)
    options = LoadOptions(kv_disk=0, kv_tokens=2048, ctx=2048)
    bench = Bench(options, kv_dir=tmp_path)
    bench.ask([chat(HEAD)], PARAMS)
    if not is_alone:
        bench.submit(chat("Hello"), replace(PARAMS, max_tokens=100))
        while not bench.engine._scheduler.running:
            bench.engine.step(wait=False)
    bench.run([bench.submit(chat(text(2, 1700)), PARAMS)])
    assert bench.model.prefix_store is not None
    assert bench.model.prefix_store.stats()[0].blocks > 4
    end(bench)


def test_what_is_evicted_while_much_waits_is_on_disk_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reused: Reply
) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 1000)
    may_write, write = threading.Event(), DiskTier.write

    def late(disk: DiskTier, block: KVBlock) -> None:
        assert may_write.wait(30)
        write(disk, block)

    monkeypatch.setattr(DiskTier, "write", late)
    first = Bench(LoadOptions(kv_tokens=2048, ctx=2048), kv_dir=tmp_path)
    first.ask([chat(HEAD)], PARAMS)
    first.run([first.submit(chat(text(2, 1700)), PARAMS)])
    store = first.model.prefix_store
    assert store is not None
    assert store.num_unsaved > 500
    may_write.set()
    end(first)
    assert store.num_unsaved == store.stats()[1].unwritten_tokens_total == 0
    again = Bench(DISK, kv_dir=tmp_path)
    (reply,) = again.ask([chat(HEAD)], PARAMS)
    (restored,) = reply.finished.timings.restored
    assert (restored.tier, restored.tokens > 500) == ("disk", True)
    assert noisy([reply], [reused], NOISE) <= 1
    end(again)


def test_an_idle_engine_brings_back_what_was_used_last(tmp_path: Path, reused: Reply) -> None:
    first = Bench(LoadOptions(), kv_dir=tmp_path)
    first.ask([chat(HEAD)], PARAMS)
    end(first)
    again = Bench(LoadOptions(), kv_dir=tmp_path)
    again.engine._prepare_until_mail()
    (reply,) = again.ask([chat(HEAD)], PARAMS)
    (restored,) = reply.finished.timings.restored
    assert restored.tier == "ram"
    assert restored.tokens > 500
    assert reply.text == reused.text
    end(again)


def test_accounts_do_not_share(tmp_path: Path) -> None:
    first = Bench(DISK, kv_dir=tmp_path)
    first.run([first.submit(chat(HEAD), PARAMS, cache_salt="a")])
    end(first)
    again = Bench(DISK, kv_dir=tmp_path)
    for salt, is_restored in (("b", False), ("a", True)):
        (reply,) = again.run([again.submit(chat(HEAD), PARAMS, cache_salt=salt)])
        assert bool(reply.finished.timings.restored) is is_restored
    end(again)


def test_short_prefixes_are_saved_if_they_are_used_again(tmp_path: Path) -> None:
    short = text(5, 100)
    bench = Bench(DISK, kv_dir=tmp_path)
    bench.ask([chat(short)], PARAMS)
    assert not bench.runner.save_next_block()
    bench.ask([chat(short, "again")], PARAMS)
    assert bench.runner.save_next_block()
    end(bench)


def test_a_request_may_leave_nothing_behind(tmp_path: Path) -> None:
    first = Bench(LoadOptions(), kv_dir=tmp_path)
    for _ in range(2):
        first.run([first.submit(chat(HEAD), PARAMS, save_prefix=False)])
    assert not first.runner.save_next_block()
    end(first)
    (folder,) = namespace_folders(tmp_path)
    assert not list(stored_files(folder))
    again = Bench(LoadOptions(), kv_dir=tmp_path)
    again.run([again.submit(chat(HEAD), PARAMS, save_prefix=False)])
    again.run([again.submit(chat(HEAD), PARAMS)])
    assert again.runner.save_next_block(), "another request with these tokens may be saved"
    end(again)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_private_request_leaves_the_public_part(tmp_path: Path, is_saved: bool) -> None:
    bench = Bench(DISK, kv_dir=tmp_path)
    cache = bench.runner.kv_cache
    assert isinstance(cache, SharedCache)
    (public,) = bench.ask([chat(HEAD)], replace(PARAMS, max_tokens=1))
    (slot,) = cache._cached_prefixes
    num_public = len(slot.cached_tokens)
    while is_saved and bench.runner.save_next_block():
        pass
    messages = [*chat(HEAD), Message("assistant", public.text), *chat("Sum it up.")]
    bench.run([bench.submit(messages, PARAMS, save_prefix=False)])
    (slot,) = cache._cached_prefixes
    assert len(slot.cached_tokens) > num_public, "the same cells hold both"
    end(bench)
    (stored,) = stored_models(tmp_path)
    assert num_public - 64 <= stored.tokens <= num_public


def test_a_private_prefix_that_replaces_a_public_one_saves_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixTiers, "save_while_busy", lambda _: None)
    bench = Bench(DISK, kv_dir=tmp_path)
    cache = bench.runner.kv_cache
    assert isinstance(cache, SharedCache)
    longer = [*chat(HEAD), Message("assistant", "Yes."), *chat("Sum it up.")]
    private = bench.submit(longer, replace(PARAMS, max_tokens=60), save_prefix=False)
    while not any(seq.num_generated for seq in bench.engine._scheduler.running):
        bench.engine.step(wait=False)
    bench.run([bench.submit(chat(HEAD), replace(PARAMS, max_tokens=1))])
    (public,) = cache._cached_prefixes
    num_public = len(public.cached_tokens)
    bench.run([private])
    (slot,) = cache._cached_prefixes
    assert len(slot.cached_tokens) > num_public
    end(bench)
    (stored,) = stored_models(tmp_path)
    assert stored.tokens == num_public


def test_what_was_removed_is_saved_again(tmp_path: Path) -> None:
    bench = Bench(DISK, kv_dir=tmp_path)
    bench.ask([chat(HEAD)], PARAMS)
    store = bench.model.prefix_store
    assert store is not None
    (folder,) = namespace_folders(tmp_path)
    for _ in range(2):
        while bench.runner.save_next_block():
            pass
        store.set_idle(True)
        wait_until(lambda: len(list(stored_files(folder))) > 4)
        for file in stored_files(folder):
            file.path.unlink()
        store.set_idle(False)
        store.set_idle(True)
    end(bench)
    assert len(list(stored_files(folder))) > 4


def test_what_the_user_removed_does_not_come_back(tmp_path: Path) -> None:
    """Neither from RAM nor from the KV cache, until a request uses it again."""
    bench = Bench(LoadOptions(), kv_dir=tmp_path)
    bench.ask([chat(HEAD)], PARAMS)
    store = bench.model.prefix_store
    assert store is not None
    while bench.runner.save_next_block():
        pass
    store.set_idle(True)
    (folder,) = namespace_folders(tmp_path)
    wait_until(lambda: store.num_unsaved == 0)
    assert len(list(stored_files(folder))) > 4
    (model,) = stored_models(tmp_path)
    remove_model(model)
    store.set_idle(False)
    store.set_idle(True)
    store._num_losses += 1  # of another prompt
    assert not bench.runner.save_next_block()
    assert store.stats()[0].blocks == 0
    bench.ask([chat("short")], PARAMS)
    assert not bench.runner.save_next_block()
    bench.ask([chat(HEAD)], PARAMS)
    while bench.runner.save_next_block():
        pass
    store.set_idle(True)
    wait_until(lambda: store.num_unsaved == 0)
    assert len(list(stored_files(folder))) > 4
    remove_model(model)
    end(bench)
    assert not list(stored_files(folder))


def test_a_damaged_file_is_computed_again(tmp_path: Path, reused: Reply) -> None:
    first = Bench(DISK, kv_dir=tmp_path)
    first.ask([chat(HEAD)], PARAMS)
    end(first)
    (folder,) = namespace_folders(tmp_path)
    files = list(stored_files(folder))
    for file in files:
        content = bytearray(file.path.read_bytes())
        content[len(content) // 2] ^= 1
        file.path.write_bytes(content)
    again = Bench(DISK, kv_dir=tmp_path)
    (reply,) = again.ask([chat(HEAD)], PARAMS)
    assert reply.finished.timings.restored == ()
    assert again.stats.kv_tiers[0].refused_total == len(files)
    again.ask([chat(HEAD)], PARAMS)
    end(again)
    third = Bench(DISK, kv_dir=tmp_path)
    (reply,) = third.ask([chat(HEAD)], PARAMS)
    (restored,) = reply.finished.timings.restored
    assert restored.tokens > 600, "all of them are replaced"
    end(third)


def test_another_kv_type_model_or_build_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Bench(DISK, kv_dir=tmp_path)
    first.ask([chat(HEAD)], PARAMS)
    end(first)
    with monkeypatch.context() as other_build:
        other_build.setattr(llama_cpp, "__version__", "0.0.1")
        other = Bench(DISK, kv_dir=tmp_path)
    (reply,) = other.ask([chat(HEAD)], PARAMS)
    assert reply.finished.timings.restored == ()
    end(other)
    copied = rewrite(tmp_path / "other.gguf", {"general.name": None})
    others = (
        Bench(LoadOptions(kv_ram=0, cache_type_k="q8_0"), kv_dir=tmp_path),
        Bench(DISK, copied, kv_dir=tmp_path),
    )
    for other in others:
        (reply,) = other.ask([chat(HEAD)], PARAMS)
        assert reply.finished.timings.restored == ()
        end(other)
    assert len(namespace_folders(tmp_path)) == 4
    again = Bench(DISK, kv_dir=tmp_path)
    (reply,) = again.ask([chat(HEAD)], PARAMS)
    assert reply.finished.timings.restored, "the first is still there"
    end(again)


def test_another_build_shares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(tmp_path / "kv.sock")
    first = Bench(LoadOptions(kv_listen=address), kv_dir=tmp_path)
    first.ask([chat(HEAD)], PARAMS)
    monkeypatch.setattr(kv_tiers, "contents_fingerprint", lambda _: b"another library")
    second = Bench(LoadOptions(kv_peer=address), kv_dir=tmp_path)
    (reply,) = second.ask([chat(HEAD)], PARAMS)
    assert reply.finished.timings.restored == ()
    assert second.stats.kv_tiers[-1].error == "it has another build of the engine"
    end(second)
    end(first)
    assert len(namespace_folders(tmp_path)) == 2


@pytest.mark.parametrize("words", [200, 700])
def test_from_a_peer_as_soon_as_it_has_answered(tmp_path: Path, words: int) -> None:
    address = str(tmp_path / "kv.sock")
    copy = tmp_path / "of another machine.gguf"
    shutil.copyfile(TINY_GGUF, copy)
    os.utime(copy, ns=(1, 1))
    reading = Bench(LoadOptions(kv_disk=0, kv_listen=address), kv_dir=tmp_path)
    writing = Bench(LoadOptions(kv_disk=0, kv_peer=address), copy, kv_dir=tmp_path)
    prompt = chat(text(9, words))
    for _ in range(2):
        (computed,) = reading.ask([prompt], PARAMS)
    (reply,) = writing.ask([prompt], PARAMS)
    (restored,) = reply.finished.timings.restored
    assert restored.tier == "peer"
    assert restored.tokens == computed.finished.timings.cache_n, "as in its own KV cache"
    assert noisy([reply], [computed], NOISE) <= 1
    assert writing.stats.kv_tiers[-1].hit_tokens_total == restored.tokens
    end(reading)
    (alone,) = writing.ask([chat("another")], PARAMS)
    assert alone.text, "without the peer it computes by itself"
    end(writing)


def test_wrong_peers(tmp_path: Path) -> None:
    def load(**options: object) -> None:
        asked = LoadOptions(**options)  # type: ignore[arg-type]
        request = ModelLoadRequest("tiny", str(TINY_GGUF), asked, kv_dir=str(tmp_path))
        load_llamacpp_model(request, lambda _: None)

    with pytest.raises(InvalidRequest, match="--kv-listen is '7000': give HOST:PORT"):
        load(kv_listen="7000")
    with pytest.raises(InvalidRequest, match="--kv-peer needs RAM or disk"):
        load(kv_peer="localhost:7000", kv_ram=0, kv_disk=0)
    with pytest.raises(InvalidRequest, match="--kv-peer does not work here"):
        load(kv_peer="localhost:7000", prefix_cache=False)
    with pytest.raises(InvalidRequest, match=r"--kv-ram is 10.0 TB, there are"):
        load(kv_ram=10**13)
    with pytest.raises(LoadFailed, match=r"cannot use --kv-listen /nowhere/kv.sock: No such file"):
        load(kv_listen="/nowhere/kv.sock")


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_leave_pool_and_tiers_whole(tmp_path: Path, seed: int) -> None:
    chooser = random.Random(seed)
    options = LoadOptions(kv_tokens=1024, ctx=1024, parallel=3, kv_ram=1_500_000, kv_disk=6_000_000)
    bench = Bench(options, kv_dir=tmp_path)
    cache = bench.runner.kv_cache
    assert isinstance(cache, SharedCache)
    heads = [text(100 + number, chooser.randrange(300, 800)) for number in range(5)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    seen = {"ram": 0, "disk": 0}
    for _ in range(12):
        prompts = [
            chat(chooser.choice(heads), text(chooser.randrange(99), chooser.randrange(60)))
            for _ in range(chooser.randrange(1, 4))
        ]
        for reply in bench.ask(prompts, params):
            for restored in reply.finished.timings.restored:
                seen[restored.tier] += restored.tokens
        cache.check()
        if chooser.random() < 0.5:
            bench.runner.save_next_block()
        assert bench.model.prefix_store is not None
        bench.model.prefix_store.set_idle(chooser.random() < 0.7)
        for tier in bench.stats.kv_tiers:
            assert tier.num_bytes <= tier.limit_bytes
    assert seen["ram"] + seen["disk"] > 500
    end(bench)


def notes(options: LoadOptions, path: Path, folder: Path) -> tuple[str, ...]:
    request = ModelLoadRequest("tiny", str(path), options, kv_dir=str(folder))
    model = load_llamacpp_model(request, lambda _: None)
    model.runner.close()
    assert model.prefix_store is None
    assert (model.info.options.kv_ram, model.info.options.kv_disk) == (0, 0)
    return tuple(note for note in model.info.notes if "KV cache only" in note)


@pytest.mark.parametrize(
    ("kind", "why"), [("has_sliding_window", "sliding-window"), ("is_recurrent", "recurrent")]
)
def test_models_with_windows_or_state_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    monkeypatch.setattr(f"localgen.backends.llamacpp.native.LlamaModel.{kind}", True)
    for options in (LoadOptions(), LoadOptions(kv_disk=1 << 30)):
        (note,) = notes(options, TINY_GGUF, tmp_path)
        assert why in note
    with pytest.raises(InvalidRequest, match=f"--kv-peer does not work here: .*{why}"):
        notes(LoadOptions(kv_peer="localhost:7000"), TINY_GGUF, tmp_path)


def test_switched_off(tmp_path: Path) -> None:
    for options in (LoadOptions(kv_ram=0, kv_disk=0), LoadOptions(prefix_cache=False)):
        assert notes(options, TINY_GGUF, tmp_path) == ()
    assert not list(tmp_path.iterdir())


def test_a_split_cache_has_no_tiers(tmp_path: Path) -> None:
    notes(LoadOptions(parallel=2, ctx=512), TINY_GGUF, tmp_path)
    (note,) = notes(LoadOptions(kv_unified=False, kv_disk=1 << 30), TINY_GGUF, tmp_path)
    assert "split" in note
    with pytest.raises(InvalidRequest, match=r"--kv-listen does not work here: .*split"):
        notes(LoadOptions(kv_unified=False, kv_listen="/x/y"), TINY_GGUF, tmp_path)
    for wanted in (LoadOptions(kv_disk=1 << 30), LoadOptions(kv_listen=str(tmp_path / "s"))):
        bench = Bench(replace(wanted, parallel=2, ctx=512), kv_dir=tmp_path)
        assert bench.model.info.options.kv_unified is True
        end(bench)


def test_all_sequence_ids_may_be_in_use(tmp_path: Path) -> None:
    (note,) = notes(LoadOptions(parallel=256), TINY_GGUF, tmp_path)
    assert "--parallel 256" in note


def test_a_common_template_is_no_reuse(tmp_path: Path) -> None:
    bench = Bench(LoadOptions(), kv_dir=tmp_path)
    for seed in range(6):
        bench.ask([chat(text(seed, 30))], PARAMS)
    assert not bench.runner.save_next_block()
    end(bench)
    (folder,) = namespace_folders(tmp_path)
    assert not list(stored_files(folder))


def test_a_disk_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    bench = Bench(LoadOptions(), kv_dir=blocked)
    assert any("prefixes are not kept on disk" in note for note in bench.model.info.notes)
    assert [tier.tier for tier in bench.stats.kv_tiers] == []
    bench.ask([chat("a")], PARAMS)
    assert [tier.tier for tier in bench.stats.kv_tiers] == ["ram"]
    end(bench)
