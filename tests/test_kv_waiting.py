"""Blocks that wait for the disk: those in RAM are written too, however many wait."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_blocks import NAMESPACE, STATE_BYTES, disk_tier, load_all, save_all
from serving import wait_until

from localgen.backends.kv_store import writer as writers
from localgen.backends.kv_store.blocks import BLOCK_TOKENS, KVBlock
from localgen.backends.kv_store.disk_tier import DiskTier
from localgen.backends.kv_store.store import PrefixStore

BLOCK_BYTES = STATE_BYTES + 4 * BLOCK_TOKENS
TEXT = [7 * number % 1000 for number in range(10 * BLOCK_TOKENS)]


@pytest.fixture(autouse=True)
def small_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MAX_WAITING_BYTES", 2 * BLOCK_BYTES)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes nothing before the event; then all."""
    may_write, write = threading.Event(), DiskTier.write

    def late(self: DiskTier, block: KVBlock) -> None:
        assert may_write.wait(30)
        write(self, block)

    monkeypatch.setattr(DiskTier, "write", late)
    yield may_write
    may_write.set()


def opened(folder: Path, ram: int = 0) -> PrefixStore:
    return PrefixStore(NAMESPACE, ram_bytes=ram, disk=disk_tier(folder))


def stored_after(store: PrefixStore, folder: Path, tokens: list[int]) -> int:
    """How many tokens of a prompt another process finds when this store has been closed."""
    store.close(time.monotonic() + 30)
    again = opened(folder)
    num_loaded = load_all(again, tokens)
    again.close(time.monotonic() + 30)
    return num_loaded


def test_an_idle_engine_writes_what_is_in_ram_alone(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    """Nobody asks for it again: the KV cache had to make room."""
    store = opened(tmp_path, ram=1 << 20)
    save_all(store, TEXT)
    assert store.stats()[1].unsaved_tokens == len(TEXT)
    store.set_idle(True)
    slow_disk.set()
    wait_until(lambda: store.num_unsaved == 0)
    assert (store.stats()[1].blocks, store.stats()[1].unwritten_tokens_total) == (10, 0)
    assert stored_after(store, tmp_path, TEXT) == len(TEXT)


def test_what_is_in_ram_alone_is_written_at_the_end(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    store = opened(tmp_path, ram=1 << 20)
    save_all(store, TEXT)
    slow_disk.set()
    assert stored_after(store, tmp_path, TEXT) == len(TEXT)


def test_what_is_in_ram_alone_is_said_if_there_was_no_time(
    tmp_path: Path, slow_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path, ram=1 << 20)
    save_all(store, TEXT)
    store.close(time.monotonic())
    slow_disk.set()
    assert "1,280 tokens of prefixes were not written to disk: there was no time" in caplog.text


def test_what_ram_drops_waits_in_the_queue(tmp_path: Path, slow_disk: threading.Event) -> None:
    store = opened(tmp_path, ram=10 * BLOCK_BYTES)
    save_all(store, TEXT)
    save_all(store, [3] * (2 * BLOCK_TOKENS))
    assert len(store._ram) == 10
    slow_disk.set()
    assert store.stats()[1].unwritten_tokens_total == store.num_losses == 0
    assert stored_after(store, tmp_path, TEXT) == len(TEXT)


def test_what_neither_ram_nor_the_queue_has_room_for_is_counted(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    store = opened(tmp_path, ram=10 * BLOCK_BYTES)
    save_all(store, TEXT)
    for token in range(6):
        save_all(store, [token] * BLOCK_TOKENS)
    assert load_all(store, TEXT) == 6 * BLOCK_TOKENS, "four in RAM, two in the queue"
    assert store.num_losses == 4
    slow_disk.set()
    store.set_idle(True)
    wait_until(lambda: store.num_unsaved == 0)
    assert store.stats()[1].unwritten_tokens_total == 4 * BLOCK_TOKENS, "the others have parents"
    assert store.stats()[1].blocks == 12
    save_all(store, TEXT)  # as a KV cache does then
    assert stored_after(store, tmp_path, TEXT) == len(TEXT)


def test_a_disk_that_fails_makes_nobody_save_what_is_lost_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskTier, "write", full)
    store = opened(tmp_path, ram=4 * BLOCK_BYTES)
    store.set_idle(True)
    save_all(store, TEXT[:BLOCK_TOKENS])
    wait_until(lambda: bool(store.stats()[1].error))
    for token in range(20):
        save_all(store, [token] * BLOCK_TOKENS)
    assert store.num_losses == 0
    assert store.stats()[1].unwritten_tokens_total == 15 * BLOCK_TOKENS
    assert store.num_unsaved == 6 * BLOCK_TOKENS, "of RAM and of the queue"
    store.close(time.monotonic() + 30)


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_that_fill_the_queue(seed: int, tmp_path: Path) -> None:
    chooser = random.Random(seed)
    store = opened(tmp_path, ram=1 << 20)
    heads = [[chooser.randrange(50) for _ in range(300)] for _ in range(3)]
    saved, most = [], 0
    for _ in range(40):
        ending = [chooser.randrange(50) for _ in range(chooser.randrange(600))]
        prompt = chooser.choice(heads)[: chooser.randrange(300)] + ending
        store.set_idle(chooser.random() < 0.3)
        load_all(store, prompt)
        save_all(store, prompt)
        saved.append(prompt)
        most = max(most, store.num_unsaved)
    assert most > 2 * 2 * BLOCK_TOKENS
    store.close(time.monotonic() + 30)
    again = opened(tmp_path)
    assert [load_all(again, prompt) for prompt in saved] == [len(prompt) for prompt in saved]
    assert store.stats()[1].unwritten_tokens_total == again.num_refused == 0
    again.close(time.monotonic() + 30)
