"""Stored prefixes are loaded a slice at a time, and saved without holding up answers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from fake_runner import FakeRunner
from kv_blocks import NAMESPACE

from localgen.backends.engine import prefix_tiers
from localgen.backends.engine.prefix_tiers import MAX_SAVING_SHARE, PrefixTiers
from localgen.backends.engine.scheduler import Scheduler
from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.kv_store import prefix_load
from localgen.backends.kv_store.blocks import KVBlock, token_array
from localgen.backends.kv_store.prefix_load import PrefixLoad
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.sequence import Sequence, SequenceState
from localgen.backends.sampling_params import BASE_SAMPLING

SLICE = 8  # tokens that one call loads


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class StoredRunner(FakeRunner):
    """All tokens but the last of a prompt that begins with 7 are in the store."""

    def __init__(self, store: PrefixStore, clock: Clock, blocks: int = 0) -> None:
        super().__init__(kv_tokens=256)
        self.store, self.clock, self.blocks = store, clock, blocks
        self.loading: list[Sequence] = []
        self.slices_s: list[float] = []
        self.num_looks = 0

    def admit(self, seq: Sequence, *, spare: int) -> int:
        cached = super().admit(seq, spare=spare)
        if seq.tokens[0] == 7 and cached < len(seq.tokens) - 1:
            self.loading.append(seq)
        return cached

    def is_loading(self, seq: Sequence) -> bool:
        return seq in self.loading

    def load_prefix(self, seq: Sequence, until_s: float) -> int:
        self.slices_s.append(until_s - self.clock())
        end = min(seq.num_computed + SLICE, len(seq.tokens) - 1)
        self.store.record_restored("ram", end - seq.num_computed, ms=1.0, compute_ms=100.0)
        self.cache[seq] = seq.tokens[:end]
        if end == len(seq.tokens) - 1:
            self.loading.remove(seq)
        return end

    def release(self, seq: Sequence, *, keep: bool) -> None:
        if seq in self.loading:
            self.loading.remove(seq)
        super().release(seq, keep=keep)

    def save_next_block(self) -> bool:
        if not self.blocks:
            self.clock.now_s += 0.0001  # to find that there is none
            self.num_looks += 1
            return False
        self.blocks -= 1
        self.clock.now_s += 0.004
        return True


class Rig:
    def __init__(self, blocks: int = 0) -> None:
        self.clock = Clock()
        self.store = PrefixStore(NAMESPACE, ram_bytes=1000, disk=None)
        self.runner = StoredRunner(self.store, self.clock, blocks)
        self.tiers = PrefixTiers(self.runner, self.store, self.clock)
        self.scheduler = Scheduler(
            self.runner,
            budget=TokenBudget(16, 1e9),
            max_queue=9,
            tiers=self.tiers,
            clock=self.clock,
        )

    def submit(self, name: str, tokens: list[int]) -> Sequence:
        seq = Sequence(
            id=name,
            tokens=tokens,
            num_prompt=len(tokens),
            params=BASE_SAMPLING,
            ctx=256,
            max_len=len(tokens) + 30,
        )
        self.scheduler.submit(seq)
        return seq

    def step(self) -> list[str]:
        """One step; returns the names of the sequences in it."""
        chunks = self.scheduler.plan()
        if chunks:
            result = self.runner.collect(self.runner.launch(chunks))
            self.scheduler.apply(chunks, result, 1.0)
        return [chunk.seq.id for chunk in chunks]


def test_answers_go_on_while_another_prompt_is_loaded() -> None:
    rig = Rig()
    running = rig.submit("running", [1, 2, 3])
    rig.step()
    loaded = rig.submit("loaded", [7] * 30)
    for done in (8, 16, 24):
        before = running.num_generated
        assert rig.step() == ["running"]
        assert (loaded.num_computed, running.num_generated) == (done, before + 1)
    assert rig.step() == ["running", "loaded"], "the last slice, and the token that is left"
    assert loaded.num_generated == 1
    assert rig.runner.slices_s == [pytest.approx(prefix_tiers.LOAD_BESIDE_OTHERS_S)] * 4
    (restored,) = loaded.restored
    assert (restored.tokens, restored.ms) == (29, 4.0)
    assert (loaded.num_cached, rig.scheduler.counters.prefix_hits) == (29, 29)


def test_a_prompt_that_is_alone_is_loaded_in_longer_slices() -> None:
    rig = Rig()
    seqs = [rig.submit(name, [7, *[number] * 19]) for number, name in enumerate("ab")]
    while not all(seq.num_generated for seq in seqs):
        rig.step()
    assert [round(each, 9) for each in rig.runner.slices_s] == [
        *[prefix_tiers.LOAD_ALONE_S] * 3,  # of the first, while the other one waits for its turn
        *[prefix_tiers.LOAD_BESIDE_OTHERS_S] * 3,
    ]


def test_a_request_that_is_cancelled_stops_loading() -> None:
    rig = Rig()
    seq = rig.submit("a", [7] * 40)
    assert rig.step() == []
    rig.scheduler.end(seq)
    assert seq.state is SequenceState.ENDED
    assert not rig.tiers.is_loading(seq)
    assert rig.step() == []
    assert not rig.scheduler.has_work


def test_a_preempted_prompt_is_loaded_again() -> None:
    rig = Rig()
    first = rig.submit("first", [1, 2, 3])
    rig.step()
    seq = rig.submit("a", [7] * 40)
    rig.step()
    assert rig.scheduler.preempt_one()
    assert (seq.state, seq.num_computed) == (SequenceState.QUEUED, 0)
    while not seq.num_generated:
        rig.step()
    assert seq.num_cached == SLICE, "what was there at its first admission"
    assert first.num_generated > 5


def test_a_busy_engine_saves_for_a_small_share_of_the_time() -> None:
    rig = Rig(blocks=1000)
    for _ in range(2000):
        rig.tiers.save_while_busy()
        rig.clock.now_s += 0.05
    elapsed_s = rig.clock.now_s - Clock.now_s
    num_saved = 1000 - rig.runner.blocks
    assert 0.8 * MAX_SAVING_SHARE < num_saved * 0.004 / elapsed_s <= MAX_SAVING_SHARE


def test_a_busy_engine_does_not_look_for_blocks_in_each_step() -> None:
    rig = Rig()
    for _ in range(1000):
        rig.tiers.save_while_busy()
        rig.clock.now_s += 0.001
    assert 60 < rig.runner.num_looks < 80


@pytest.fixture
def slow_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixStore]:
    """Reading a block takes 0.2 s by the clock that PrefixLoad reads."""
    now_s = [5.0]
    fake = SimpleNamespace(perf_counter=lambda: now_s[0], monotonic=lambda: now_s[0])
    monkeypatch.setattr(prefix_load, "time", fake)
    store = PrefixStore(NAMESPACE, ram_bytes=10**6, disk=None)
    load = store.load

    def slow(*given: object) -> object:
        now_s[0] += 0.2
        return load(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "load", slow)
    yield store
    store.close(0.0)


@pytest.mark.parametrize(
    ("prefill_per_s", "num_loaded"),
    [(0.0, 1024), (500.0, 1024), (10_000.0, 128)],
    ids=["unknown", "slower than reading", "faster"],
)
def test_what_is_faster_computed_is_not_loaded(
    slow_store: PrefixStore, prefill_per_s: float, num_loaded: int
) -> None:
    tokens = list(range(1024))
    slow_store.prefill_per_s = prefill_per_s
    while unsaved := slow_store.next_unsaved(tokens, ""):
        slow_store.save(unsaved, lambda: np.zeros(8, np.uint8))
    put: list[tuple[int, int]] = []

    def take(_: KVBlock, start: int, end: int) -> bool:
        put.append((start, end))
        return True

    load = PrefixLoad(slow_store, tokens, slow_store.find(tokens, ""), 0, take)
    load.advance(5.0)
    assert put == [(0, 128)], "at least one block"
    load.advance(1e9)
    assert load.num_loaded == num_loaded
    assert load.is_done


def test_a_block_that_has_no_room_ends_the_load() -> None:
    store = PrefixStore(NAMESPACE, ram_bytes=10**6, disk=None)
    tokens = token_array(range(300)).tolist()
    while unsaved := store.next_unsaved(tokens, ""):
        store.save(unsaved, lambda: np.zeros(8, np.uint8))
    load = PrefixLoad(store, tokens, store.find(tokens, ""), 0, lambda *given: given[1] == 0)
    load.advance(1e9)
    assert (load.num_loaded, load.is_done) == (128, True)
