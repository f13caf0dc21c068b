"""Pages that were evicted come back from RAM and disk with the keys and values they had."""

from __future__ import annotations

import itertools
import random
import shutil
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_models import make
from kv_blocks import NAMESPACE, disk_tier
from models import LoadedBench, noisy
from paged_runner import PagedRunner
from test_cuda_kv_cache import serve

from localgen.backends.cuda import kv_tiers
from localgen.backends.cuda.kv import stored_pages
from localgen.backends.cuda.kv_tiers import _rotations
from localgen.backends.cuda.loader import load_cuda_model
from localgen.backends.cuda.model import decoder, host_copy
from localgen.backends.cuda.model.decoder import KVCache
from localgen.backends.cuda.model.host_copy import device_errors
from localgen.backends.cuda.model.source import open_model_source
from localgen.backends.cuda.runner import CudaRunner
from localgen.backends.engine import prefix_tiers
from localgen.backends.engine.prefix_tiers import PrefixTiers
from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.kv_store import prefix_load, writer
from localgen.backends.kv_store.disk_tier import namespace_folders, stored_files
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.kv_store.writer import BlockWriter
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.runner.interface import StepFailed
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message

TINY = Path(__file__).parents[1] / "localgen/models/tiny"
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
NOISE = 0.05


class StoredBench(LoadedBench):
    """The built-in model in the CUDA runner on the CPU, with a store."""

    def __init__(self, folder: Path, **options: object) -> None:
        asked = LoadOptions(backend="cuda", device="cpu", **options)  # type: ignore[arg-type]
        request = ModelLoadRequest("tiny", str(TINY), asked, kv_dir=str(folder))
        super().__init__(load_cuda_model(request, lambda _share: None))

    def check(self) -> None:
        assert isinstance(self.model.runner, CudaRunner)
        self.model.runner.kv_cache.check()

    def end(self) -> None:
        self.engine.save_prefixes(time.monotonic() + 30)
        self.close()


def chat(seed: int, words: int) -> list[Message]:
    chooser = random.Random(seed)
    text = " ".join(chooser.choice(["red", "blue", "seven", "house"]) for _ in range(words))
    return [Message(role="user", content=text)]


@pytest.mark.parametrize("kv_type", ["f32", "int8"])
def test_the_same_from_disk_after_a_restart(tmp_path: Path, kv_type: str) -> None:
    types = {"cache_type_k": kv_type, "cache_type_v": kv_type, "kv_ram": 0}
    first = StoredBench(tmp_path, **types)
    first.ask([chat(1, 600)], PARAMS)
    (reused,) = first.ask([chat(1, 600)], PARAMS)
    first.end()
    again = StoredBench(tmp_path, **types)
    (reply,) = again.ask([chat(1, 600)], PARAMS)
    assert reply.text == reused.text
    assert reply.logprobs == reused.logprobs
    (restored,) = reply.finished.timings.restored
    assert restored.tier == "disk"
    assert restored.tokens == reply.finished.timings.cache_n == reused.finished.timings.cache_n
    again.end()


def test_from_ram_after_eviction(tmp_path: Path) -> None:
    bench = StoredBench(tmp_path, kv_tokens=1024, ctx=1024, kv_disk=0)
    (computed,) = bench.ask([chat(1, 600)], PARAMS)
    bench.ask([chat(2, 700)], PARAMS)
    bench.ask([chat(3, 700)], PARAMS)
    (reply,) = bench.ask([chat(1, 600)], PARAMS)
    (restored,) = reply.finished.timings.restored
    assert restored.tier == "ram"
    assert restored.tokens > 500
    assert noisy([reply], [computed], NOISE) <= 1
    assert not list(tmp_path.iterdir())
    bench.end()


def test_short_prefixes_are_saved_if_they_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixTiers, "save_while_busy", lambda _: None)
    bench = StoredBench(tmp_path, kv_ram=0)
    assert isinstance(bench.model.runner, CudaRunner)
    bench.ask([chat(1, 60)], PARAMS)
    assert not bench.model.runner.save_next_block()
    bench.ask([chat(1, 60)], PARAMS)
    assert bench.model.runner.save_next_block()
    bench.end()


def test_what_has_ended_is_saved_while_others_run(tmp_path: Path) -> None:
    bench = StoredBench(tmp_path, kv_disk=0)
    bench.submit(chat(2, 5), replace(PARAMS, max_tokens=300))
    bench.run([bench.submit(chat(1, 600), PARAMS)])
    store = bench.model.prefix_store
    assert store is not None
    while not store.stats()[0].blocks:
        bench.engine.step(wait=False)
    assert bench.engine._scheduler.running
    bench.end()


class NeverDone(host_copy.HostCopy):
    """A copy in flight until somebody waits for it."""

    @property
    def is_done(self) -> bool:
        return False


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "to_host_beside_steps", lambda tensor: NeverDone(tensor, None))


@pytest.mark.usefixtures("late_copies")
def test_copies_in_flight_are_on_disk_after_the_end(tmp_path: Path) -> None:
    first = StoredBench(tmp_path, kv_ram=0)
    (computed,) = first.ask([chat(1, 600)], PARAMS)
    running = first.submit(chat(2, 5), replace(PARAMS, max_tokens=300))
    store, runner = first.model.prefix_store, first.model.runner
    assert store is not None
    assert isinstance(runner, CudaRunner)
    while not first.engine._scheduler.running:
        first.engine.step(wait=False)
    while runner.save_next_block():
        first.engine.step(wait=False)
    assert (store.stats()[0].blocks, first.replies[running].end) == (0, None)
    assert store.num_unsaved > 500
    first.end()
    assert store.num_unsaved == 0
    again = StoredBench(tmp_path, kv_ram=0)
    (reply,) = again.ask([chat(1, 600)], PARAMS)
    (restored,) = reply.finished.timings.restored
    assert restored.tokens > 500
    assert noisy([reply], [computed], NOISE) <= 1
    again.end()


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_is_pushed_out_is_saved_first_unless_a_request_would_wait(
    is_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixTiers, "save_while_busy", lambda _: None)
    monkeypatch.setattr(PrefixTiers, "prepare", lambda _: False)
    bench = StoredBench(tmp_path, kv_tokens=1024, ctx=1024, kv_disk=0)
    (computed,) = bench.ask([chat(1, 600)], PARAMS)
    running = [] if is_alone else [bench.submit(chat(2, 5), replace(PARAMS, max_tokens=300))]
    bench.run([bench.submit(chat(3, 700), PARAMS)])
    bench.run(running)
    (reply,) = bench.ask([chat(1, 600)], PARAMS)
    timings = reply.finished.timings
    restored = sum(part.tokens for part in timings.restored)
    assert (restored > 250, timings.cache_n > 500) == (is_alone, is_alone)
    assert noisy([reply], [computed], NOISE) <= 1
    bench.end()


def test_a_request_may_leave_nothing_behind(tmp_path: Path) -> None:
    bench = StoredBench(tmp_path)
    assert isinstance(bench.model.runner, CudaRunner)
    for _ in range(2):
        bench.run([bench.submit(chat(1, 600), PARAMS, save_prefix=False)])
    assert not bench.model.runner.save_next_block()
    bench.end()
    (folder,) = namespace_folders(tmp_path)
    assert not list(stored_files(folder))


def test_from_a_peer_as_soon_as_it_has_answered(tmp_path: Path) -> None:
    address = str(tmp_path / "kv.sock")
    reading = StoredBench(tmp_path, kv_disk=0, kv_listen=address)
    writing = StoredBench(tmp_path, kv_disk=0, kv_peer=address)
    for _ in range(2):
        (computed,) = reading.ask([chat(1, 300)], PARAMS)
    (reply,) = writing.ask([chat(1, 300)], PARAMS)
    (restored,) = reply.finished.timings.restored
    assert restored.tier == "peer"
    assert restored.tokens == computed.finished.timings.cache_n, "as in its own KV cache"
    assert noisy([reply], [computed], NOISE) <= 1
    reading.end()
    writing.end()


def test_another_kv_type_or_build_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kv_type, build in (
        ("f32", torch.__version__),
        ("int8", torch.__version__),
        ("f32", "2.0.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__version__", build)
            bench = StoredBench(tmp_path, cache_type_k=kv_type, cache_type_v=kv_type)
        (reply,) = bench.ask([chat(1, 600)], PARAMS)
        assert reply.finished.timings.restored == ()
        bench.end()
    assert len(namespace_folders(tmp_path)) == 3


def test_a_build_is_known_by_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Path(kv_tiers.__file__).parents[1]
    copied = tmp_path / "of another machine"
    for name in ("cuda", "formats"):
        shutil.copytree(sources / name, copied / name)
    edited = tmp_path / "edited"
    shutil.copytree(copied, edited)
    with (edited / "cuda/kernels/norm.py").open("a") as file:
        file.write("# mended\n")
    restored = []
    for folder in (sources, copied, edited):
        monkeypatch.setattr(kv_tiers, "__file__", str(folder / "cuda/kv_tiers.py"))
        bench = StoredBench(tmp_path / "kv", kv_ram=0)
        (reply,) = bench.ask([chat(1, 600)], PARAMS)
        restored.append([part.tier for part in reply.finished.timings.restored])
        bench.end()
    assert restored == [[], ["disk"], []]


def test_not_without_the_prefix_cache(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--kv-peer does not work here"):
        StoredBench(tmp_path, prefix_cache=False, kv_peer="localhost:7000")
    bench = StoredBench(tmp_path, prefix_cache=False)
    assert bench.model.prefix_store is None
    assert not list(tmp_path.iterdir())
    bench.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_pages_are_read_and_written_bit_by_bit(dtype: torch.dtype) -> None:
    cache = KVCache.zeros(read_hf_config(TINY), 6, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for layer in cache.layers:
        for tensor in layer.tensors:
            noise = torch.randint(0, 256, (tensor.nbytes,), generator=generator)
            tensor.view(torch.uint8).view(-1).copy_(noise.to(torch.uint8))
    copy = cache.read_pages([4, 1, 3, 0, 2])
    cache.copy_pages([(5, 0), (5, 2), (5, 4)])  # which does not change what was read
    state = copy.wait()
    cache.write_pages([4, 0, 2], state[[0, 3, 4]])
    state = state[:3]
    cache.write_pages([0, 2], state[1:])
    for layer in cache.layers:
        for tensor in layer.tensors:
            content = tensor.view(torch.uint8)
            assert torch.equal(content[0], content[1])
            assert torch.equal(content[2], content[3])
            assert not torch.equal(content[4], content[5])


@pytest.mark.parametrize("method", ["read_pages", "write_pages"])
def test_a_device_without_memory_computes_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fails(*_: object) -> None:
        with device_errors():
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(KVCache, method, fails)
    for is_saved in (True, False):
        bench = StoredBench(tmp_path)
        (reply,) = bench.ask([chat(1, 600)], PARAMS)
        assert reply.finished.timings.restored == ()
        assert reply.text
        bench.end()
        (folder,) = namespace_folders(tmp_path)
        assert bool(list(stored_files(folder))) is (method == "write_pages"), is_saved


def test_other_errors_of_the_device_end_the_engine() -> None:
    with pytest.raises(StepFailed, match="illegal memory"), device_errors():
        raise RuntimeError("an illegal memory access was encountered")


def test_rotations_of_long_contexts_have_a_key_of_their_own(tmp_path: Path) -> None:
    make("phi4 mini", tmp_path)
    source = open_model_source(tmp_path)
    trained = source.spec.rope.scaling.trained_len  # type: ignore[union-attr]
    short, same, long = (list(_rotations(source, each)) for each in (trained, 8, trained + 1))
    assert short == same != long


def test_random_schedules_within_tiny_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each admission checks that the pages hold the tokens that they are said to hold.

    The copies of pages that are saved are done at once, or any time later.
    """
    monkeypatch.setattr(stored_pages, "MIN_PREFIX_TOKENS", 16)
    monkeypatch.setattr(prefix_load, "MIN_LOAD_TOKENS", 16)
    monkeypatch.setattr(prefix_tiers, "LOAD_ALONE_S", 0.0)  # a block in each step
    monkeypatch.setattr(prefix_tiers, "LOAD_BESIDE_OTHERS_S", 0.0)
    seen: Counter[str] = Counter()
    is_due = BlockWriter._is_due
    for seed, is_late in itertools.product([*range(15), *range(15)], (False, True)):
        has_disk = seed % 2 == 1
        is_last = seed % 4 == 1  # little may wait, and it is written at the end
        monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 2000 if is_last else 1 << 20)
        monkeypatch.setattr(BlockWriter, "_is_due", (lambda _: False) if is_last else is_due)
        store = PrefixStore(
            NAMESPACE,
            ram_bytes=0 if has_disk and seed % 3 else 4000,
            disk=disk_tier(tmp_path, 30_000) if has_disk else None,
        )
        store.set_idle(seed % 3 == 0)
        runner = PagedRunner(num_pages=8, max_seqs=5, batch=40, share=True, store=store)
        if is_late:
            runner.memory.finishes = partial(one_in_ten, random.Random(seed))
        serve(runner, random.Random(seed))
        while runner.cache.save_next_block():
            pass
        assert store.count_unsaved() == 0 or store.is_full
        seen["waits"] += sum(copy.num_waits for copy in runner.memory.copies)
        for tier in store.stats():
            assert tier.num_bytes <= tier.limit_bytes
            seen[tier.tier] += tier.hit_tokens_total
        store.close(time.monotonic() + 30)
        seen["lost"] += store.num_losses
    assert seen["lost"] > 2, seen
    assert seen["ram"] > 200, seen
    assert seen["disk"] > 200, seen
    assert seen["waits"] > 20, seen


def one_in_ten(chooser: random.Random) -> bool:
    return chooser.random() < 0.1
