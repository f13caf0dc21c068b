"""Pages are saved beside steps: nothing waits for a copy, and it holds what the pages held then."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
from kv_blocks import NAMESPACE, disk_tier
from paged_runner import PagedRunner
from test_cuda_kv_cache import sequence

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.page_saves import MAX_IN_FLIGHT
from localgen.backends.kv_store import writer
from localgen.backends.kv_store.blocks import BLOCK_TOKENS, KVBlock
from localgen.backends.kv_store.disk_tier import DiskTier
from localgen.backends.kv_store.inventory import remove_model, stored_models
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.interface import StepFailed
from localgen.backends.runner.sequence import Sequence

# of a page of paged_runner, whose tokens take 8 bytes
BLOCK_BYTES = BLOCK_TOKENS * (8 + 4)
LONG = 5 * BLOCK_TOKENS


class WatchedStore(PrefixStore):
    """Lists the blocks that are saved, and those that were refused."""

    def __init__(self, ram_bytes: int = 1 << 20, disk: DiskTier | None = None) -> None:
        super().__init__(NAMESPACE, ram_bytes=ram_bytes, disk=disk)
        self.saved: list[KVBlock] = []
        self.num_refusals = 0

    def save(self, unsaved, copy_state) -> bool:  # type: ignore[no-untyped-def]
        state = copy_state()
        is_saved = super().save(unsaved, lambda: state)
        self.num_refusals += not is_saved
        if is_saved:
            self.saved.append(KVBlock(**unsaved._asdict(), compute_ms=0.0, state=state))
        return is_saved


class Bench:
    """A paged cache whose copies are done when `is_done` says so."""

    def __init__(self, num_pages: int, store: WatchedStore | None = None) -> None:
        self.store = store or WatchedStore()
        self.runner = PagedRunner(
            num_pages=num_pages, max_seqs=9, batch=10_000, share=True, store=self.store
        )
        self.memory, self.cache = self.runner.memory, self.runner.cache
        self.is_done = False
        self.memory.finishes = lambda: self.is_done

    def compute(self, tokens: Seq[int]) -> Sequence:
        """Admit a sequence of these tokens and one more, load what is stored, compute the rest."""
        seq = sequence(str(tokens[:2]), [*tokens, 7])
        seq.num_computed = self.runner.admit(seq, spare=0)
        while self.runner.is_loading(seq):
            seq.num_computed = self.runner.load_prefix(seq, 0.0)
        assert self.runner.grow(seq, seq.num_uncomputed)
        self.memory.copy()
        self.memory.write(seq, seq.num_computed, seq.tokens[seq.num_computed :])
        seq.num_computed = len(seq.tokens)
        return seq

    def ask(self, tokens: Seq[int]) -> None:
        self.runner.release(self.compute(tokens), keep=True)

    def save(self) -> None:
        """Save all that can be saved now."""
        while self.runner.save_next_block():
            self.cache.check()

    def num_stored(self, tokens: Seq[int]) -> int:
        return self.store.num_stored(list(tokens), "")

    @property
    def num_waits(self) -> int:
        return sum(copy.num_waits for copy in self.memory.copies)


def text(seed: int, length: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(1000) for _ in range(length)]


def test_what_is_pushed_out_is_saved_as_it_was() -> None:
    """The pages have other tokens long before the copies are done."""
    bench, prompt = Bench(48), text(1, LONG)
    bench.ask(prompt)
    other = bench.compute(text(3, 500))
    assert bench.cache.num_cached(prompt, "") < LONG / 2, "reused"
    assert bench.num_waits == LONG // BLOCK_TOKENS - MAX_IN_FLIGHT == 1
    bench.save()
    assert bench.num_waits == 1, "running requests wait for no copy"
    assert bench.num_stored(prompt) == BLOCK_TOKENS
    bench.is_done = True
    bench.save()
    assert bench.num_stored(prompt) == LONG
    bench.runner.release(other, keep=False)
    again = bench.compute(prompt)
    assert bench.memory.read(again, LONG) == prompt
    assert bench.store.stats()[0].hit_tokens_total > LONG / 2


def test_running_requests_do_not_wait_for_what_they_push_out() -> None:
    bench, prompt = Bench(48), text(1, LONG)
    bench.ask(prompt)
    running = [bench.compute(text(2, 20)), bench.compute(text(3, 600))]
    assert bench.cache.num_cached(prompt, "") < LONG / 2, "reused"
    bench.is_done = True
    bench.save()
    assert bench.num_waits == 0
    assert bench.num_stored(prompt) < LONG / 2
    for each in running:
        bench.runner.release(each, keep=False)


def test_a_prompt_finds_what_has_been_copied_meanwhile() -> None:
    bench, prompt = Bench(48), text(1, LONG)
    bench.ask(prompt)
    first = bench.compute(text(2, 700))
    bench.is_done = True
    bench.runner.release(first, keep=False)
    again = bench.compute(prompt)
    assert bench.memory.read(again, LONG) == prompt
    restored = bench.store.stats()[0].hit_tokens_total
    assert restored == LONG - bench.runner.seen["hits"] > LONG / 2


def test_saving_beside_a_running_request_starts_a_few_copies_and_waits_for_none() -> None:
    bench = Bench(60)
    bench.ask(text(1, LONG))
    running = bench.compute(text(2, 100))
    started = [bench.runner.save_next_block() for _ in range(MAX_IN_FLIGHT + 2)]
    assert started == [True] * MAX_IN_FLIGHT + [False] * 2
    assert (len(bench.memory.copies), bench.num_waits, bench.store.saved) == (4, 0, [])
    bench.runner.release(running, keep=False)
    bench.save()  # an idle engine waits, and leaves nothing in flight
    assert len(bench.store.saved) == len(bench.memory.copies) == LONG // BLOCK_TOKENS
    assert bench.store.count_unsaved() == 0


@pytest.mark.parametrize("seed", range(20))
def test_each_block_is_copied_once_and_stored_behind_the_one_it_follows(seed: int) -> None:
    """Prompts that share blocks, or begin in the middle of one, while copies are in flight."""
    chooser = random.Random(seed)
    bench, stem = Bench(400), text(seed, 700)
    bench.memory.finishes = lambda: chooser.random() < 0.2
    running = bench.compute(text(99, 20))
    for number in range(6):
        shared = chooser.randrange(0, 701, PAGE_TOKENS)
        bench.ask([*stem[:shared], *text(number, 1200 - shared)][: chooser.randint(550, 1200)])
        for _ in range(chooser.randint(0, 5)):
            bench.runner.save_next_block()
    bench.runner.release(running, keep=False)
    bench.save()
    known = {bench.store.saved[0].parent}
    for block in bench.store.saved:
        assert block.parent in known
        assert block.digest not in known, "saved twice"
        known.add(block.digest)
        saved = block.state.view(bench.memory.pages.dtype)
        assert saved.tolist() == block.tokens.tolist()
    assert len(bench.memory.copies) == len(bench.store.saved) > 20
    assert bench.store.count_unsaved() == bench.store.num_refusals == 0


def test_a_prompt_larger_than_ram_keeps_its_head_though_its_copies_were_all_in_flight() -> None:
    bench, prompt = Bench(60, WatchedStore(3 * BLOCK_BYTES)), text(1, LONG)
    bench.ask(prompt)
    running = bench.compute(text(2, 100))
    bench.save()
    bench.is_done = True
    bench.save()
    assert bench.num_stored(prompt) == 3 * BLOCK_TOKENS
    assert bench.store.num_refusals == 1, "what follows a refused block is not stored"
    assert bench.runner.save_next_block() is False
    bench.runner.release(running, keep=False)


@pytest.fixture
def slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes nothing before the event; then all."""
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", int(2.5 * BLOCK_BYTES))
    may_write, write = threading.Event(), DiskTier.write

    def late(self: DiskTier, block: KVBlock) -> None:
        may_write.wait(30)
        write(self, block)

    monkeypatch.setattr(DiskTier, "write", late)
    yield may_write
    may_write.set()


def test_what_a_slow_disk_refuses_is_saved_when_it_has_room(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    store = WatchedStore(0, disk_tier(tmp_path))
    bench, prompt = Bench(60, store), text(1, LONG)
    bench.ask(prompt)
    running = bench.compute(text(2, 100))
    bench.save()
    bench.is_done = True
    bench.save()
    assert (store.num_refusals, bench.num_stored(prompt)) == (1, 2 * BLOCK_TOKENS)
    slow_disk.set()
    deadline_s = time.monotonic() + 30
    while bench.num_stored(prompt) < LONG and time.monotonic() < deadline_s:
        bench.save()
        time.sleep(0.01)
    assert bench.num_stored(prompt) == LONG
    bench.runner.release(running, keep=False)
    store.close(time.monotonic() + 30)


def test_what_a_slow_disk_has_no_room_for_is_in_ram_and_written(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    store = WatchedStore(1 << 20, disk_tier(tmp_path))
    bench, prompt = Bench(48, store), text(1, LONG)
    bench.ask(prompt)
    bench.is_done = True
    bench.runner.release(bench.compute(text(3, 700)), keep=False)
    assert bench.cache.num_cached(prompt, "") < LONG / 2, "reused"
    assert (store.num_refusals, store.is_full) == (0, True)
    assert store.num_unsaved >= LONG
    slow_disk.set()
    bench.save()
    store.close(time.monotonic() + 30)
    assert store.num_unsaved == store.num_losses == 0
    again = WatchedStore(0, disk_tier(tmp_path))
    assert again.num_stored(prompt, "") == LONG
    again.close(time.monotonic() + 30)


def test_what_the_user_removed_is_not_saved_before_it_is_used(tmp_path: Path) -> None:
    """Neither what is saved, nor what is in flight."""
    store = WatchedStore(1 << 20, disk_tier(tmp_path))
    bench, saved, in_flight = Bench(200, store), text(1, LONG), text(2, LONG)
    bench.is_done = True
    bench.ask(saved)
    bench.save()
    bench.is_done = False
    running = bench.compute(text(3, 100))
    bench.ask(in_flight)
    bench.save()
    (model,) = stored_models(tmp_path)
    remove_model(model)
    store.set_idle(True)
    store._num_losses += 1  # of another prompt
    bench.is_done = True
    bench.save()
    assert [bench.num_stored(each) for each in (saved, in_flight)] == [0, 0]
    assert store.num_unsaved == 0
    bench.ask(saved)
    bench.save()
    assert bench.num_stored(saved) == LONG
    bench.runner.release(running, keep=False)
    store.close(time.monotonic() + 30)


def test_a_store_that_others_fetch_from_has_all_when_a_request_ends() -> None:
    bench, prompt = Bench(60), text(1, 300)
    bench.store.is_shared = True
    running = bench.compute(text(2, 100))
    bench.ask(prompt)
    assert bench.num_stored(prompt) == 288, "whole pages"
    assert bench.num_waits > 0
    bench.runner.release(running, keep=False)


def test_an_error_of_the_device_during_a_copy_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(60)
    bench.ask(text(1, LONG))
    assert bench.runner.save_next_block()

    def fails() -> None:
        raise StepFailed("the GPU failed")

    monkeypatch.setattr(bench.memory.copies[0], "wait", fails)
    bench.is_done = True
    with pytest.raises(StepFailed):
        bench.runner.save_next_block()


def test_pages_that_main_memory_has_no_room_for_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, prompt = Bench(60), text(1, LONG)
    bench.ask(prompt)
    assert bench.runner.save_next_block()

    def fails() -> None:
        raise MemoryError

    monkeypatch.setattr(bench.memory.copies[0], "wait", fails)
    bench.save()
    assert bench.num_stored(prompt) == bench.store.count_unsaved() == 0
