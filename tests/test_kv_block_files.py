"""A block on disk is whole, of this user, of this model and of these tokens, or it is refused."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kv_blocks import NAMESPACE, block_of, chain, disk_tier, state_of
from serving import wait_until

from localgen.backends.kv_store import block_file
from localgen.backends.kv_store import disk_tier as disk_tiers
from localgen.backends.kv_store.block_file import BlockRefused, load_key, read_block, write_block
from localgen.backends.kv_store.blocks import BLOCK_TOKENS
from localgen.backends.kv_store.disk_tier import StoredFile, least_recent_first, stored_files

OTHER = bytes(16)
PARENT = b"p" * 16
BLOCK = block_of(PARENT, list(range(BLOCK_TOKENS)))


@pytest.fixture
def key(tmp_path: Path) -> bytes:
    return load_key(tmp_path)


@pytest.fixture
def path(tmp_path: Path, key: bytes) -> Path:
    write_block(tmp_path, NAMESPACE, BLOCK, key)
    return tmp_path / block_file.file_name(PARENT, BLOCK.digest)


def refusal(path: Path, key: bytes, namespace: bytes = NAMESPACE) -> str:
    with pytest.raises(BlockRefused) as refused:
        read_block(path, namespace, key)
    return str(refused.value)


def test_what_is_written_is_read(path: Path, key: bytes) -> None:
    found = read_block(path, NAMESPACE, key)
    assert found.tokens.tolist() == BLOCK.tokens.tolist()
    assert (found.parent, found.start, found.compute_ms) == (PARENT, 0, 1000.0)
    assert (found.state == BLOCK.state).all()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(path.parent.glob(f"*{block_file.UNFINISHED_SUFFIX}"))


def test_each_flipped_bit_is_noticed(path: Path, key: bytes) -> None:
    whole, chooser = path.read_bytes(), random.Random(1)
    for at in [*range(70), *chooser.sample(range(len(whole)), 200), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chooser.randrange(8)
        path.write_bytes(damaged)
        assert refusal(path, key)


def test_each_truncation_is_noticed(path: Path, key: bytes) -> None:
    whole = path.read_bytes()
    for size in [0, 1, 60, 80, len(whole) - 33, len(whole) - 32, len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert refusal(path, key)
    path.write_bytes(whole + b"\0")
    assert "size" in refusal(path, key)


def test_blocks_of_others_are_refused(path: Path, key: bytes) -> None:
    assert "another model" in refusal(path, key, OTHER)
    assert "another key" in refusal(path, bytes(32))
    other = path.with_name(block_file.file_name(PARENT, b"d" * 16))
    path.rename(other)
    assert "name" in refusal(other, key)
    path.symlink_to(other)
    assert "symbolic link" in refusal(path, key)


def test_files_of_others_are_refused(path: Path, key: bytes, tmp_path: Path) -> None:
    path.chmod(0o640)
    assert "other users" in refusal(path, key)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    assert "regular" in refusal(pipe, key)
    assert "regular" in refusal(tmp_path, key)


def test_files_of_another_owner_are_refused(
    path: Path, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert "another user" in refusal(path, key)


def test_the_key_is_the_users(tmp_path: Path, key: bytes) -> None:
    assert load_key(tmp_path) == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "key").write_bytes(key[:-1])
    with pytest.raises(BlockRefused, match="31 bytes"):
        load_key(tmp_path)
    (tmp_path / "key").write_bytes(key)
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(BlockRefused, match="other users"):
        load_key(tmp_path)


def test_two_processes_make_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    link = Path.hardlink_to

    def second_is_first(self: Path, target: Path) -> None:
        monkeypatch.setattr(Path, "hardlink_to", link)
        written.append(load_key(tmp_path))
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", second_is_first)
    assert [load_key(tmp_path)] == written


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_block(tmp_path, NAMESPACE, BLOCK, key)
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


def write_until_killed(folder: Path, seed: int) -> None:
    disk, chooser = disk_tier(folder), random.Random(seed)
    while True:
        for block in chain([chooser.randrange(1000) for _ in range(400)]):
            disk.write(block)


def test_killed_writers_leave_whole_blocks_or_none(tmp_path: Path) -> None:
    chooser, num_blocks, delay_s = random.Random(2), 0, 0.02
    disk_tier(tmp_path)
    folder = tmp_path / NAMESPACE.hex()
    for seed in range(200):
        child = os.fork()
        if not child:
            write_until_killed(tmp_path, seed)
        time.sleep(chooser.random() * delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        disk, before = disk_tier(tmp_path), num_blocks
        for file in stored_files(folder):
            block = disk.read(file.digest)
            assert block is not None
            assert (block.state == state_of(block.parent, block.tokens)).all()
            disk.remove(file.digest)
            num_blocks += 1
        assert disk.num_refused == 0
        # on a busy machine it takes longer until a block is written
        delay_s = min(1.0, 1.5 * delay_s) if num_blocks == before else max(0.02, delay_s / 1.2)
    assert num_blocks > 50
    unfinished = list(folder.glob(f"*{block_file.UNFINISHED_SUFFIX}"))
    assert unfinished, "no process was killed while it wrote"
    for each in unfinished:
        os.utime(each, (0, 0))
    disk_tier(tmp_path)
    assert not list(folder.glob(f"*{block_file.UNFINISHED_SUFFIX}"))


# -- the tier -------------------------------------------------------------------------------


def stored(name: str, parent: str, used_s: float) -> StoredFile:
    return StoredFile(Path(name), parent.encode(), name.encode(), 1, used_s)


@pytest.mark.parametrize(
    ("files", "order"),
    [
        ([("a", "", 1), ("b", "", 2)], "ab"),
        # used with the block behind it, and removed after it
        ([("a", "", 1), ("b", "a", 3), ("c", "", 2)], "cba"),
        ([("a", "", 1), ("b", "a", 1), ("c", "b", 1)], "cba"),
        ([("a", "", 9), ("b", "a", 1), ("c", "a", 2)], "bca"),
        ([("a", "b", 1), ("b", "a", 1), ("c", "", 2)], "abc"),  # a circle of forged names
    ],
)
def test_order_of_eviction(files: list[tuple[str, str, float]], order: str) -> None:
    found = least_recent_first(stored(*each) for each in files)
    assert "".join(str(file.path) for file in found) == order


def test_the_budget_is_that_of_all_models(tmp_path: Path) -> None:
    size = block_file.file_size(BLOCK)
    first = disk_tier(tmp_path, limit=100 * size)
    second = disk_tier(tmp_path, limit=100 * size, namespace=OTHER)
    for number in range(60):
        for disk, namespace in ((first, NAMESPACE), (second, OTHER)):
            for block in chain([number] * (2 * BLOCK_TOKENS), namespace=namespace):
                disk.write(block)
        files = [f for each in disk_tiers.namespace_folders(tmp_path) for f in stored_files(each)]
        # each engine learns of the other's writes late
        assert len(files) <= 100 + disk_tiers.WRITES_PER_SCAN
    assert len(files) >= 90, "no more is removed than needed"
    held = {file.digest for file in files}
    num_ends = sum(file.parent in held for file in files)
    assert num_ends >= len(files) // 2 - 1, "a block is removed after those behind it"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has none")
def test_what_was_used_last_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, blocks = disk_tier(tmp_path), list(chain([1] * (2 * BLOCK_TOKENS)))
    for used_s, block in enumerate([BLOCK, *blocks], 1):
        disk.write(block)
        (file,) = [f for f in stored_files(tmp_path / NAMESPACE.hex()) if f.digest == block.digest]
        os.utime(file.path, (used_s, used_s))
    read: list[str] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *_: read.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    monkeypatch.setattr(disk_tiers, "READ_AHEAD_BYTES", 2 * block_file.file_size(BLOCK))
    disk_tier(tmp_path)
    wait_until(lambda: len(read) == 2)
    assert [Path(each).name[:32] for each in read] == [block.parent.hex() for block in blocks]


def test_a_full_disk_can_still_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_tier(tmp_path).write(BLOCK)
    about = (tmp_path / NAMESPACE.hex() / disk_tiers.ABOUT_NAME).read_bytes()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    disk = disk_tier(tmp_path)
    assert disk.read(BLOCK.digest) is not None
    assert (tmp_path / NAMESPACE.hex() / disk_tiers.ABOUT_NAME).read_bytes() == about


def test_a_foreign_file_is_neither_used_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path / NAMESPACE.hex()
    folder.mkdir(mode=0o700)
    for name in ("notes.txt", "notes.new"):
        (folder / name).write_text("mine")
        os.utime(folder / name, (0, 0))
    (folder / ("x" * 32 + "-" + "y" * 32 + ".kv")).write_text("no digest")
    disk = disk_tier(tmp_path)
    assert len(disk) == 0
    assert (folder / "notes.txt").read_text() == (folder / "notes.new").read_text() == "mine"


def test_what_killed_writers_left_goes_from_all_folders(tmp_path: Path) -> None:
    disk_tier(tmp_path, namespace=OTHER)
    folders = (tmp_path, tmp_path / OTHER.hex(), tmp_path / NAMESPACE.hex())
    folders[-1].mkdir(mode=0o700)
    for folder in folders:
        for used_s in (0.0, time.time()):  # the second is still being written
            path = folder / block_file.unfinished_name()
            path.touch()
            os.utime(path, (used_s, used_s))
    disk_tier(tmp_path)
    assert [len(list(folder.glob("*.new"))) for folder in folders] == [1, 1, 1]


def test_a_block_may_go_while_room_is_made(tmp_path: Path) -> None:
    """The engine's thread forgets a block that is gone, the writer's follows its chain."""
    disk = disk_tier(tmp_path)
    first, second, *_ = chain([1] * (3 * BLOCK_TOKENS))
    disk.write(first)
    disk.write(second)

    class Parents(dict[bytes, bytes]):
        thread: threading.Thread | None = None

        def __contains__(self, digest: object) -> bool:
            is_there = super().__contains__(digest)
            if self.thread is None:
                self.thread = threading.Thread(target=disk.remove, args=(second.digest,))
                self.thread.start()
                self.thread.join(0.2)
            return is_there

    disk._parents = parents = Parents(disk._parents)
    assert disk._chain_before(second.digest) == {first.digest, second.digest}
    assert parents.thread is not None
    parents.thread.join()
    assert disk._chain_before(second.digest) == set()


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_block_that_is_gone_or_damaged_is_forgotten(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    disk = disk_tier(tmp_path)
    disk.write(BLOCK)
    (file,) = stored_files(tmp_path / NAMESPACE.hex())
    change(file.path)
    assert disk.read(BLOCK.digest) is None
    assert BLOCK.digest not in disk
    assert disk.children(PARENT) == []
    assert not file.path.exists()


def test_a_block_that_goes_while_files_are_listed_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_tier(tmp_path)
    (block, *_) = chain([1] * 300)
    disk.write(block)
    listed = list(stored_files(tmp_path / NAMESPACE.hex()))
    disk.remove(block.digest)
    monkeypatch.setattr(disk_tiers, "stored_files", lambda folder: listed)
    disk.refresh()
    assert disk.num_bytes == 0
    assert block.digest not in disk
