"""PrefixStore: what comes back is what was saved for these tokens, within any budget."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
from kv_blocks import NAMESPACE, STATE_BYTES, disk_tier, load_all, save_all, state_of
from serving import wait_until

from localgen.backends.kv_store import writer as writers
from localgen.backends.kv_store.blocks import BLOCK_TOKENS, KVBlock
from localgen.backends.kv_store.disk_tier import DiskTier, NoRoomForBlock, stored_files
from localgen.backends.kv_store.prefix_load import PrefixLoad
from localgen.backends.kv_store.store import PrefixStore

TEXT = [7 * number % 1000 for number in range(3 * BLOCK_TOKENS + 50)]


def ram_only(limit: int = 1 << 20) -> PrefixStore:
    return PrefixStore(NAMESPACE, ram_bytes=limit, disk=None)


def on_disk(folder: Path, *, ram: int = 0, limit: int = 1 << 30) -> PrefixStore:
    return PrefixStore(NAMESPACE, ram_bytes=ram, disk=disk_tier(folder, limit))


def close(store: PrefixStore) -> None:
    store.close(time.monotonic() + 30)


def test_whole_prompts_come_back(tmp_path: Path) -> None:
    for store in (ram_only(), on_disk(tmp_path)):
        save_all(store, TEXT)
        assert load_all(store, TEXT) == len(TEXT)
        assert load_all(store, [*TEXT, 1, 2, 3]) == len(TEXT)
        assert load_all(store, TEXT[:200]) == 200, "a part of a block"
        assert load_all(store, [*TEXT[:300], 5, *TEXT[301:]]) == 300, "up to another token"
        assert load_all(store, TEXT, salt="of another account") == 0
        assert load_all(store, TEXT[1:]) == 0
        close(store)


def test_the_disk_survives(tmp_path: Path) -> None:
    first = on_disk(tmp_path)
    save_all(first, TEXT)
    close(first)
    again = on_disk(tmp_path)
    assert load_all(again, TEXT) == len(TEXT)
    other = PrefixStore(bytes(16), ram_bytes=0, disk=disk_tier(tmp_path, namespace=bytes(16)))
    assert load_all(other, TEXT) == 0, "of another model"
    for store in (again, other):
        close(store)


def test_what_was_used_last_comes_back_into_ram(tmp_path: Path) -> None:
    size = STATE_BYTES + 4 * BLOCK_TOKENS
    first = on_disk(tmp_path)
    for number in range(4):  # two blocks each
        save_all(first, [number] * (2 * BLOCK_TOKENS))
    close(first)
    files = sorted(stored_files(tmp_path / NAMESPACE.hex()), key=lambda file: file.used_s)
    assert len(files) == 8
    used_s = {file.digest: file.used_s for file in files}
    again = on_disk(tmp_path, ram=5 * size)
    while again.restore_next():
        pass
    assert not again.restore_next()
    ram = again.stats()[0]
    assert (ram.blocks, ram.num_bytes) == (5, 5 * size), "as many as have room"
    read = {file.digest: file.used_s for file in stored_files(tmp_path / NAMESPACE.hex())}
    assert read == used_s, "it does not count as used"
    for number, is_in_ram in ((3, True), (2, True), (0, False)):
        found = again.find([number] * (2 * BLOCK_TOKENS), "")
        assert len(found) == 2
        assert all((each.digest in again._ram) is is_in_ram for each in found)
    close(again)


def test_what_comes_back_is_dropped_in_the_order_of_its_use(tmp_path: Path) -> None:
    size = STATE_BYTES + 4 * BLOCK_TOKENS
    first = on_disk(tmp_path)
    for number in range(3):
        save_all(first, [number] * (2 * BLOCK_TOKENS))
    close(first)
    again = on_disk(tmp_path, ram=6 * size)
    while again.restore_next():
        pass
    save_all(again, [9] * (3 * BLOCK_TOKENS))
    held = []
    for number in range(3):
        found = again.find([number] * (2 * BLOCK_TOKENS), "")
        held.append(sum(each.digest in again._ram for each in found))
    assert held == [0, 1, 2]
    close(again)


def test_a_damaged_block_does_not_come_back(tmp_path: Path) -> None:
    first = on_disk(tmp_path)
    save_all(first, TEXT)
    close(first)
    for file in stored_files(tmp_path / NAMESPACE.hex()):
        content = bytearray(file.path.read_bytes())
        content[-1] ^= 1
        file.path.write_bytes(content)
    again = on_disk(tmp_path, ram=1 << 20)
    assert not again.restore_next()
    assert again.stats()[0].blocks == 0
    assert again.num_refused == 4
    close(again)


def test_a_longer_end_replaces_a_shorter_one(tmp_path: Path) -> None:
    store = on_disk(tmp_path, ram=1 << 20)
    store.set_idle(True)
    for end in (BLOCK_TOKENS + 20, BLOCK_TOKENS + 60, 2 * BLOCK_TOKENS, len(TEXT)):
        save_all(store, TEXT[:end])
        assert load_all(store, TEXT) == end
        time.sleep(0.02)
    close(store)
    lengths = [file.num_bytes for file in stored_files(tmp_path / NAMESPACE.hex())]
    assert len(lengths) == 4
    assert store.stats()[0].blocks == 4


@pytest.mark.parametrize("has_disk", [False, True])
def test_random_schedules_within_tiny_budgets(has_disk: bool, tmp_path: Path) -> None:
    chooser = random.Random(3)
    size = STATE_BYTES + 4 * BLOCK_TOKENS
    disk = disk_tier(tmp_path, 12 * (size + 200)) if has_disk else None
    store = PrefixStore(NAMESPACE, ram_bytes=5 * size, disk=disk)
    heads = [[chooser.randrange(50) for _ in range(chooser.randrange(600))] for _ in range(6)]
    loaded = 0
    for _ in range(600):
        prompt = chooser.choice(heads)[: chooser.randrange(600)]
        prompt = prompt + [chooser.randrange(50) for _ in range(chooser.randrange(300))]
        salt = chooser.choice(["", "", "b"])
        loaded += load_all(store, prompt, salt)
        store.set_idle(chooser.random() < 0.5)
        if chooser.random() < 0.7:
            save_all(store, prompt, salt)
        for tier in store.stats():
            assert tier.num_bytes <= tier.limit_bytes
    close(store)
    assert loaded > 10_000
    again = PrefixStore(
        NAMESPACE, ram_bytes=0, disk=disk_tier(tmp_path, 12 * (size + 200)) if has_disk else None
    )
    assert any(load_all(again, head) for head in heads) is has_disk
    close(again)


def test_the_disk_is_written_only_while_the_engine_is_idle(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    save_all(store, TEXT)
    time.sleep(0.1)
    assert not list(stored_files(tmp_path / NAMESPACE.hex()))
    assert load_all(store, TEXT) == len(TEXT), "what waits can be used"
    store.set_idle(True)
    wait_until(lambda: len(list(stored_files(tmp_path / NAMESPACE.hex()))) == 4)
    close(store)


def test_a_busy_engine_cannot_queue_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = STATE_BYTES + 4 * BLOCK_TOKENS
    monkeypatch.setattr(writers, "MAX_WAITING_BYTES", 4 * size)
    store = on_disk(tmp_path)
    for number in range(50):
        save_all(store, [number] * (2 * BLOCK_TOKENS))
    wait_until(lambda: len(list(stored_files(tmp_path / NAMESPACE.hex()))) >= 2)
    close(store)
    assert 2 <= store.stats()[0].blocks <= 100


def test_a_disk_that_fails_is_said_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on_disk(tmp_path, ram=1 << 20)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskTier, "write", full)
    store.set_idle(True)
    save_all(store, TEXT)
    wait_until(lambda: bool(store.stats()[1].error))
    assert store.stats()[1].error == "No space left on device"
    save_all(store, TEXT[::-1])
    assert load_all(store, TEXT) == len(TEXT), "the RAM goes on"
    assert load_all(store, TEXT[::-1]) == len(TEXT)
    assert store.num_unsaved == 2 * len(TEXT), "of which the second half was not even queued"
    close(store)


def test_a_block_that_is_read_slower_than_computed_is_not_written(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    store.set_idle(True)
    store.prefill_per_s = 1e9
    save_all(store, TEXT)
    wait_until(lambda: store.stats()[0].blocks == 4)
    save_all(store, TEXT[:200][::-1])
    wait_until(lambda: store.stats()[0].blocks == 6)
    assert load_all(store, TEXT) == len(TEXT)  # takes longer than nothing
    assert store.stats()[0].unwritten_tokens_total == 0
    save_all(store, TEXT[::-1])
    close(store)
    assert store.stats()[0].blocks == 6
    assert store.stats()[0].unwritten_tokens_total >= BLOCK_TOKENS


def test_a_prefix_larger_than_the_queue_reaches_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "MAX_WAITING_BYTES", 4 * (STATE_BYTES + 4 * BLOCK_TOKENS))
    text = [n % 997 for n in range(30 * BLOCK_TOKENS)]
    for ram in (0, 1 << 20):
        store, end = on_disk(tmp_path / f"{ram}", ram=ram), 0
        store.set_idle(True)
        while (unsaved := store.next_unsaved(text, "", end)) is not None:
            if store.is_full:
                wait_until(lambda store=store: not store.is_full)  # type: ignore[misc]
            state = state_of(unsaved.parent, unsaved.tokens)
            if store.save(unsaved, lambda state=state: state):  # type: ignore[misc]
                end = unsaved.start + BLOCK_TOKENS
        close(store)
        assert load_all(on_disk(tmp_path / f"{ram}"), text) == len(text)


def test_what_was_queued_is_written_when_the_disk_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "RETRY_S", 0.2)
    store = on_disk(tmp_path)
    with monkeypatch.context() as failing:

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        failing.setattr(DiskTier, "write", fail)
        save_all(store, TEXT)
        store.set_idle(True)
        wait_until(lambda: bool(store.stats()[0].error))
        assert store.stats()[0].error == "No space left on device"
        assert (store.stats()[0].unsaved_tokens, store.num_losses) == (len(TEXT), 0)
        assert load_all(store, TEXT) == len(TEXT), "what waits can be used"
    wait_until(lambda: store.stats()[0].blocks == 4)
    assert (store.stats()[0].error, store.stats()[0].unsaved_tokens) == ("", 0)
    assert store.num_losses == 1, "prefixes that were not even queued are looked at again"
    close(store)


def test_a_block_that_cannot_be_written_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "RETRY_S", 0.2)
    store, write, failures = on_disk(tmp_path), DiskTier.write, iter([KeyError("a bug")])

    def write_all_but_one(disk: DiskTier, block: KVBlock) -> None:
        for failure in failures:
            raise failure
        write(disk, block)

    monkeypatch.setattr(DiskTier, "write", write_all_but_one)
    other = [1 + token for token in TEXT]
    save_all(store, TEXT)
    save_all(store, other)
    store.set_idle(True)
    wait_until(lambda: store.stats()[0].error == "'a bug'")
    wait_until(lambda: store.stats()[0].unsaved_tokens == 0)
    assert store.stats()[0].error == ""
    assert store.stats()[0].unwritten_tokens_total == len(TEXT), "and what follows it"
    assert load_all(store, other) == len(other)
    assert store.num_losses == 1
    save_all(store, TEXT)  # as a KV cache does then
    close(store)
    assert load_all(on_disk(tmp_path), TEXT) == len(TEXT)


def test_no_room_for_a_block_does_not_mean_that_a_full_disk_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "RETRY_S", 0.05)
    store = on_disk(tmp_path)
    failures: list[Exception] = [OSError(28, "No space left on device"), NoRoomForBlock()]

    def fail(*_: object) -> None:
        raise failures.pop(0) if len(failures) > 1 else failures[0]

    monkeypatch.setattr(DiskTier, "write", fail)
    save_all(store, TEXT)
    store.set_idle(True)
    wait_until(lambda: store.stats()[0].unsaved_tokens == 0)
    assert store.stats()[0].error == "No space left on device"
    assert store.num_losses == 0
    close(store)


def test_a_disk_that_fails_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskTier, "write", full)
    store = on_disk(tmp_path, ram=1 << 20)
    save_all(store, TEXT)
    monkeypatch.setattr(writers, "MAX_WAITING_BYTES", STATE_BYTES)
    assert store.is_full
    store.set_idle(True)
    wait_until(lambda: bool(store.stats()[1].error))
    assert not store.is_full, "the RAM gets more"
    store.close(time.monotonic() + 30)
    assert "434 tokens of prefixes were not written to disk: No space left on device" in caplog.text


def test_what_there_was_no_time_for_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(DiskTier, "write", lambda *_: goes_on.wait())
    store = on_disk(tmp_path)
    store.count_unsaved = lambda: 1000  # of the KV cache
    save_all(store, TEXT)
    store.close(time.monotonic())
    goes_on.set()
    said = "1,434 tokens of prefixes were not written to disk: there was no time for them"
    assert said in caplog.text


def test_the_end_of_the_queue_is_announced(tmp_path: Path) -> None:
    store, drained = on_disk(tmp_path), threading.Event()
    store.on_drained(drained.set)
    save_all(store, TEXT)
    assert not drained.wait(0.1)
    store.set_idle(True)
    assert drained.wait(10)
    assert store.stats()[0].blocks == 4
    close(store)


@pytest.mark.parametrize("ram", [0, 4 * 1600])
def test_a_prompt_larger_than_a_tier_keeps_its_head(tmp_path: Path, ram: int) -> None:
    text = [n % 997 for n in range(20 * BLOCK_TOKENS)]
    store = on_disk(tmp_path, ram=ram, limit=8 * 1700)
    store.set_idle(True)
    save_all(store, text)
    close(store)
    assert store.stats()[-1].error == ""
    assert store.stats()[-1].unwritten_tokens_total >= 12 * BLOCK_TOKENS
    again = on_disk(tmp_path)
    assert 6 * BLOCK_TOKENS <= load_all(again, text) <= 8 * BLOCK_TOKENS
    close(again)


def test_what_other_processes_write_and_remove_is_noticed(tmp_path: Path) -> None:
    one, other = on_disk(tmp_path), on_disk(tmp_path)
    save_all(one, TEXT)
    close(one)
    assert load_all(other, TEXT) == 0
    other.set_idle(True)
    assert load_all(other, TEXT) == len(TEXT)
    assert other.num_losses == 0
    for file in stored_files(tmp_path / NAMESPACE.hex()):
        file.path.unlink()
    other.set_idle(True)
    assert other.num_losses == 1
    assert other.stats()[0].blocks == 0
    assert other.next_unsaved(TEXT, "") is not None
    close(other)


def test_use_in_ram_counts_for_the_disk(tmp_path: Path) -> None:
    store = on_disk(tmp_path, ram=1 << 20)
    store.set_idle(True)
    save_all(store, TEXT)
    wait_until(lambda: store.stats()[1].blocks == 4)
    files = list(stored_files(tmp_path / NAMESPACE.hex()))
    for file in files:
        os.utime(file.path, (1, 1))
    assert load_all(store, TEXT) == len(TEXT)
    used = [file.used_s > 1 for file in stored_files(tmp_path / NAMESPACE.hex())]
    assert used.count(True) == 1, "the last block, which stands for those before it"
    close(store)


def test_what_was_saved_is_counted(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    store.record_restored("disk", 100, 20.0, 5000.0)
    store.record_restored("ram", 5, 1.0, 0.0)
    store.record_restored("disk", 28, 10.0, 1000.0)
    ram, disk = store.take_restored()
    assert (disk.tier, disk.tokens, disk.ms, disk.saved_ms) == ("disk", 128, 30.0, 5970.0)
    assert str(disk) == "128 tokens from disk in 30 ms (6 s saved)"
    assert (ram.tokens, ram.saved_ms, str(ram)) == (5, 0.0, "5 tokens from RAM in 1 ms")
    assert store.take_restored() == ()
    (tier,) = store.stats()
    assert (tier.hit_tokens_total, tier.saved_s_total) == (128, 5.97)
    close(store)


def test_a_damaged_block_ends_the_prefix(tmp_path: Path) -> None:
    first = on_disk(tmp_path)
    save_all(first, TEXT)
    close(first)
    store = on_disk(tmp_path)
    second = store.find(TEXT, "")[1]
    (damaged,) = [
        file for file in stored_files(tmp_path / NAMESPACE.hex()) if file.digest == second.digest
    ]
    damaged.path.write_bytes(damaged.path.read_bytes()[:-1] + b"\0")
    assert load_all(store, TEXT) == BLOCK_TOKENS
    assert store.stats()[0].refused_total == 1
    save_all(store, TEXT)
    close(store)
    assert load_all(on_disk(tmp_path), TEXT) == len(TEXT), "it is written again"


def test_all_refused_blocks_of_a_prompt_are_replaced_at_once(tmp_path: Path) -> None:
    first = on_disk(tmp_path)
    save_all(first, TEXT)
    close(first)
    files = sorted(stored_files(tmp_path / NAMESPACE.hex()), key=lambda file: file.path)
    for file in files:
        file.path.write_bytes(file.path.read_bytes()[:-1] + b"\0")
    store = on_disk(tmp_path)
    load = PrefixLoad(store, TEXT, store.find(TEXT, ""), 0, lambda *_: True)
    load.advance(time.monotonic() + 60)
    assert (load.num_loaded, load.is_done) == (0, True)
    assert store.stats()[0].refused_total == len(files) > 2
    save_all(store, TEXT)
    close(store)
    assert load_all(on_disk(tmp_path), TEXT) == len(TEXT)


def test_states_of_kv_blocks_differ() -> None:
    """The helper that these tests rest on."""
    from localgen.backends.kv_store.blocks import token_array

    one, two = token_array([1, 2]), token_array([1, 3])
    assert (state_of(b"a", one) != state_of(b"a", two)).any()
    assert (state_of(b"a", one) != state_of(b"b", one)).any()
