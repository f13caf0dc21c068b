"""`localgen kv rm` while engines run: they forget what it removed, and write none of it again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from kv_blocks import NAMESPACE, chain, disk_tier, save_all
from serving import wait_until

from localgen.backends.kv_store import block_file
from localgen.backends.kv_store import store as stores
from localgen.backends.kv_store.blocks import BLOCK_TOKENS, KVBlock
from localgen.backends.kv_store.disk_tier import (
    ABOUT_NAME,
    DiskCleared,
    DiskRemoval,
    DiskTier,
    stored_files,
)
from localgen.backends.kv_store.inventory import remove_model, stored_models
from localgen.backends.kv_store.store import PrefixStore

TEXT = [7 * number % 1000 for number in range(10 * BLOCK_TOKENS)]


def remove(folder: Path) -> None:
    (model,) = stored_models(folder)
    remove_model(model)


def num_files(folder: Path) -> int:
    return len(list(stored_files(folder / NAMESPACE.hex())))


@pytest.mark.parametrize("is_idle", [True, False])
def test_what_waits_for_the_disk_is_forgotten(
    is_idle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, num_written = DiskTier.write, 0

    def removed_meanwhile(disk: DiskTier, block: KVBlock) -> None:
        nonlocal num_written
        write(disk, block)
        num_written += 1
        if num_written == 4:
            remove(tmp_path)

    monkeypatch.setattr(DiskTier, "write", removed_meanwhile)
    monkeypatch.setattr(stores, "LOOK_S", 0.0)
    store = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=disk_tier(tmp_path))
    cleared: list[bool] = []
    store.on_cleared = lambda: cleared.append(True)
    save_all(store, TEXT)
    store.hurry()
    wait_until(lambda: store.num_unsaved == 0)
    assert (num_written, num_files(tmp_path)) == (4, 0)
    store.set_idle(is_idle)
    assert cleared == [True]
    assert store.num_stored(TEXT, "") == 0
    assert [tier.blocks for tier in store.stats()] == [0, 0]
    assert store.stats()[1].unwritten_tokens_total == store.num_losses == 0
    save_all(store, TEXT)  # of a request that uses it again
    store.close(time.monotonic() + 30)
    assert num_files(tmp_path) == 10


def test_the_queue_is_emptied_before_it_is_written(tmp_path: Path) -> None:
    store = PrefixStore(NAMESPACE, ram_bytes=0, disk=disk_tier(tmp_path))
    save_all(store, TEXT)
    remove(tmp_path)
    store.set_idle(True)
    assert store.num_unsaved == 0
    store.close(time.monotonic() + 30)
    assert num_files(tmp_path) == 0


def test_a_busy_engine_looks_from_time_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, is_cleared = [], DiskTier.is_cleared

    def counted(disk: DiskTier) -> bool:
        looks.append(1)
        return is_cleared(disk)

    store = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=disk_tier(tmp_path))
    monkeypatch.setattr(DiskTier, "is_cleared", counted)
    for _ in range(1000):
        store.set_idle(False)
    assert len(looks) == 1
    store.close(time.monotonic() + 30)


def test_a_block_that_is_written_meanwhile_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write has ended before the name is gone, after all other files are."""
    disk = disk_tier(tmp_path)
    first, second, *_ = chain(TEXT)
    disk.write(first)
    lstat, late = Path.lstat, [second]

    def written_before(path: Path) -> os.stat_result:
        while late and path.name == ABOUT_NAME and not num_files(tmp_path):
            disk.write(late.pop())
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", written_before)
    remove(tmp_path)
    assert not late
    assert num_files(tmp_path) == 0


def test_a_write_that_ends_later_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_tier(tmp_path)
    first, second, *_ = chain(TEXT)
    disk.write(first)
    write_block = block_file.write_block

    def removed_before(*given: Any) -> None:
        remove(tmp_path)
        (tmp_path / NAMESPACE.hex()).mkdir(mode=0o700)  # as if a file of others had kept it
        write_block(*given)

    monkeypatch.setattr(block_file, "write_block", removed_before)
    with pytest.raises(DiskCleared):
        disk.write(second)
    assert num_files(tmp_path) == 0
    assert second.digest not in disk


def test_all_engines_of_a_model_notice_it(tmp_path: Path) -> None:
    one, other = disk_tier(tmp_path), disk_tier(tmp_path)
    first, *_ = chain(TEXT)
    one.write(first)
    assert other.refresh() is DiskRemoval.NONE
    remove(tmp_path)
    assert one.refresh() is DiskRemoval.CLEARED
    one.write(first)
    assert other.refresh() is DiskRemoval.CLEARED, "though the file that it removed is there again"
    disk_tier(tmp_path)  # of a third engine
    assert [one.is_cleared(), other.is_cleared()] == [False, False]
