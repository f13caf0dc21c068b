"""Blocks on disk: a folder for each namespace, and one budget for all of them."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from localgen.backends.kv_store import block_file
from localgen.backends.kv_store.block_file import BlockRefused
from localgen.backends.kv_store.blocks import DIGEST_BYTES, KVBlock, TokenArray
from localgen.backends.units import format_size

# what stays free on the disk for other programs
RESERVED_DISK_BYTES = 1 << 30
# room is made for this fraction of the budget at once, since it means to look at all files
_ROOM_SHARE = 1 / 32
# other engines write too: after so many writes, all files are counted again
WRITES_PER_SCAN = 16
ABOUT_NAME = "model.json"
# what was used last is read into the page cache while a model is loaded, so much of it
READ_AHEAD_BYTES = 512 << 20
# a block that is used without being read is marked so at most this often
_TOUCH_S = 60.0
# an unfinished file this old belongs to a process that was killed
_UNFINISHED_S = 3600.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A block on disk. used_s: when it was last written or read (st_mtime)."""

    path: Path
    parent: bytes
    digest: bytes
    num_bytes: int
    used_s: float


def stored_files(folder: Path) -> Iterator[StoredFile]:
    """The blocks of one namespace; other files are left out."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            names = block_file.parse_file_name(entry.name)
            if names is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield StoredFile(Path(entry.path), *names, found.st_size, found.st_mtime)


def namespace_folders(folder: Path) -> list[Path]:
    """Folders of all namespaces in the folder of the disk tier."""
    with contextlib.suppress(FileNotFoundError):
        return [each for each in folder.iterdir() if _is_namespace(each)]
    return []


def _is_namespace(folder: Path) -> bool:
    is_hex = len(folder.name) == 2 * DIGEST_BYTES and set(folder.name) <= set("0123456789abcdef")
    return is_hex and folder.is_dir() and not folder.is_symlink()


def least_recent_first(files: Iterable[StoredFile]) -> list[StoredFile]:
    """Order of eviction. A block counts as used when any block behind it was, and goes after it."""
    by_digest = {file.digest: file for file in files}
    depths: dict[bytes, int] = {}
    for digest in by_digest:
        chain, each = [], digest
        while each in by_digest and each not in depths:
            depths[each] = 0  # ends a circle of parents, which only a forged name can make
            chain.append(each)
            each = by_digest[each].parent
        depth = depths.get(each, 0)
        for count, each in enumerate(reversed(chain), 1):
            depths[each] = depth + count
    used_s = {digest: file.used_s for digest, file in by_digest.items()}
    for file in sorted(by_digest.values(), key=lambda f: -depths[f.digest]):
        if file.parent in used_s:
            used_s[file.parent] = max(used_s[file.parent], used_s[file.digest])
    return sorted(by_digest.values(), key=lambda f: (used_s[f.digest], -depths[f.digest]))


class DiskRemoval(Enum):
    """Why blocks are gone from the disk: room for others was made, or `localgen kv rm` was used."""

    NONE = auto()
    EVICTED = auto()
    CLEARED = auto()


class NoRoomForBlock(Exception):
    """A block does not fit besides those that it follows."""


class DiskCleared(Exception):
    """`localgen kv rm` was used since the last DiskTier.refresh: nothing is written until then."""


class DiskTier:
    """The blocks of one namespace on disk. Thread-safe.

    folder: of all namespaces; private to the user. limit_bytes: for all namespaces together.
    about: facts for people, such as the model's name. last_used: digests of what was used last
    before, at most READ_AHEAD_BYTES; the latest first, and each after those that it follows. Raises
    OSError, BlockRefused.
    """

    def __init__(
        self, folder: Path, namespace: bytes, limit_bytes: int, about: dict[str, str]
    ) -> None:
        self.limit_bytes = limit_bytes
        self.num_refused = 0
        self._root, self._namespace = folder, namespace
        self._folder = folder / namespace.hex()
        self._about = about | {"limit_bytes": str(limit_bytes)}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._create_folder()
        self._key = block_file.load_key(folder)
        self._lock = threading.Lock()
        self._children: defaultdict[bytes, dict[bytes, int]] = defaultdict(dict)
        self._parents: dict[bytes, bytes] = {}
        self._tokens: dict[bytes, TokenArray] = {}
        self._touched_s: dict[bytes, float] = {}
        self._total_bytes = self._writes_left = self._changed_ns = 0
        for each in (folder, *namespace_folders(folder)):
            _remove_unfinished(each)
        files = list(stored_files(self._folder))
        for file in files:
            self._add(file.parent, file.digest, file.num_bytes)
        hottest = _last_used(files)
        self.last_used = [file.digest for file in hottest]
        threading.Thread(
            target=_read_ahead, args=(hottest,), name="kv-read-ahead", daemon=True
        ).start()

    def _create_folder(self) -> None:
        """Create the folder and its about file, whose id stays until `localgen kv rm` is used."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._about_id = self._read_about_id() or ""
        about_id = self._about_id or secrets.token_hex(8)
        unfinished = self._folder / block_file.unfinished_name()
        with contextlib.suppress(OSError):  # a full disk can still be read
            unfinished.write_text(json.dumps(self._about | {"id": about_id}))
            unfinished.replace(self._folder / ABOUT_NAME)
            self._about_id = about_id

    def _read_about_id(self) -> str | None:
        """The id in the about file, empty if there is none; None if it cannot be read."""
        try:
            return str(json.loads((self._folder / ABOUT_NAME).read_text())["id"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return ""
        except OSError:
            return None

    def is_cleared(self) -> bool:
        """True if `localgen kv rm` was used since the last refresh."""
        return self._is_replaced(self._about_id)

    def _is_replaced(self, about_id: str) -> bool:
        return bool(about_id) and self._read_about_id() not in (about_id, None)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._parents

    @property
    def num_bytes(self) -> int:
        """Bytes of this namespace."""
        with self._lock:
            return sum(size for sizes in self._children.values() for size in sizes.values())

    def __len__(self) -> int:
        return len(self._parents)

    def children(self, parent: bytes) -> list[tuple[bytes, TokenArray]]:
        """Digest and tokens of the blocks behind a block."""
        with self._lock:
            digests = list(self._children.get(parent, ()))
        return [(each, tokens) for each in digests if (tokens := self._tokens_of(each)) is not None]

    def _tokens_of(self, digest: bytes) -> TokenArray | None:
        if digest not in self._tokens:
            with self._refusing(digest):
                self._tokens[digest] = block_file.read_tokens(self._path(digest), self._namespace)
        return self._tokens.get(digest)

    def read(self, digest: bytes, *, is_use: bool = True) -> KVBlock | None:
        """Return a block, or None if it is gone or refused; then it is removed.

        is_use: it is dropped later than others because of this.
        """
        with self._refusing(digest):
            path = self._path(digest)
            block = block_file.read_block(path, self._namespace, self._key)
            if is_use:
                with contextlib.suppress(OSError):
                    os.utime(path)
            return block
        return None

    def touch(self, digest: bytes) -> None:
        """Note that a block was used, if it is here."""
        now_s = time.monotonic()
        if now_s - self._touched_s.get(digest, -_TOUCH_S) < _TOUCH_S:
            return
        with contextlib.suppress(OSError, KeyError):
            os.utime(self._path(digest))
            self._touched_s[digest] = now_s

    def refresh(self) -> DiskRemoval:
        """Take note of what other processes have written and removed."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        is_cleared = self.is_cleared()
        if changed_ns == self._changed_ns and not is_cleared:
            return DiskRemoval.NONE
        self._changed_ns = changed_ns
        files = {file.digest: file for file in stored_files(self._folder)}
        gone = [digest for digest in list(self._parents) if digest not in files]
        gone = [digest for digest in gone if not self._has_file(digest)]
        for digest in gone:
            self._forget(digest)
        with self._lock:
            for digest, file in files.items():
                # the writer may have removed it since, and forgets it with this lock
                if digest not in self._parents and file.path.exists():
                    self._add(file.parent, digest, file.num_bytes)
        if is_cleared:
            self._about_id = self._read_about_id() or ""
            return DiskRemoval.CLEARED
        return DiskRemoval.EVICTED if gone else DiskRemoval.NONE

    def _has_file(self, digest: bytes) -> bool:
        try:
            return self._path(digest).exists()
        except KeyError:
            return False

    def write(self, block: KVBlock) -> None:
        """Write a block; the least recently used ones make room.

        Raises OSError, NoRoomForBlock, or DiskCleared.
        """
        about_id = self._about_id
        if self._is_replaced(about_id):
            raise DiskCleared
        if block.start and block.parent not in self._parents:
            raise NoRoomForBlock  # the one that it follows had none
        size = block_file.file_size(block)
        if not about_id:
            self._create_folder()
            about_id = self._about_id
        try:
            self._make_room(size, block.parent)
            block_file.write_block(self._folder, self._namespace, block, self._key)
        except FileNotFoundError:  # `localgen kv rm` removes the folder at this moment
            raise DiskCleared from None
        self._total_bytes += size
        with self._lock:
            self._add(block.parent, block.digest, size)
        if self._is_replaced(about_id):  # it has not seen the new file
            self.remove(block.digest)
            raise DiskCleared

    def remove(self, digest: bytes) -> None:
        """Remove a block if it is there."""
        with contextlib.suppress(KeyError, OSError):
            self._path(digest).unlink()
        self._forget(digest)

    def _path(self, digest: bytes) -> Path:
        return self._folder / block_file.file_name(self._parents[digest], digest)

    @contextlib.contextmanager
    def _refusing(self, digest: bytes) -> Iterator[None]:
        """Remove the block if it is refused."""
        try:
            yield
        except BlockRefused as reason:
            _log.warning("refused %s: %s; its tokens are computed again", digest.hex(), reason)
            self.num_refused += 1
            self.remove(digest)
        except (OSError, KeyError):  # removed by another process
            self._forget(digest)

    def _add(self, parent: bytes, digest: bytes, size: int) -> None:
        self._parents[digest] = parent
        self._children[parent][digest] = size

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._tokens.pop(digest, None)
            self._touched_s.pop(digest, None)
            parent = self._parents.pop(digest, b"")
            if parent in self._children:
                self._children[parent].pop(digest, None)
                if not self._children[parent]:
                    del self._children[parent]

    def _make_room(self, needed: int, parent: bytes) -> None:
        """Remove the least recently used blocks of all namespaces until a new one fits.

        parent: of the new one; it and those before it stay, since it is useless without them.
        """
        self._writes_left -= 1
        free = shutil.disk_usage(self._folder).free - RESERVED_DISK_BYTES
        fits = needed <= free and self._total_bytes + needed <= self.limit_bytes
        if fits and self._writes_left > 0:
            return
        files = [f for each in namespace_folders(self._root) for f in stored_files(each)]
        self._total_bytes = sum(file.num_bytes for file in files)
        self._writes_left = WRITES_PER_SCAN
        limit = min(self.limit_bytes, self._total_bytes + free)
        if self._total_bytes + needed <= limit:
            return
        followed = self._chain_before(parent)
        for file in least_recent_first(files):
            if self._total_bytes + needed <= limit * (1 - _ROOM_SHARE):
                break
            if file.digest in followed:
                continue
            with contextlib.suppress(OSError):
                file.path.unlink()
            self._total_bytes -= file.num_bytes
            self._forget(file.digest)
        if self._total_bytes + needed > limit:
            if limit < self.limit_bytes:
                least = format_size(RESERVED_DISK_BYTES)
                raise OSError(errno.ENOSPC, f"less than {least} of it would stay free")
            raise NoRoomForBlock

    def _chain_before(self, digest: bytes) -> set[bytes]:
        """A block, if it is here, and those that it follows."""
        chain: set[bytes] = set()
        with self._lock:
            while digest in self._parents and digest not in chain:
                chain.add(digest)
                digest = self._parents[digest]
        return chain


def _last_used(files: list[StoredFile]) -> list[StoredFile]:
    """See DiskTier.last_used."""
    left = READ_AHEAD_BYTES
    found = []
    for file in reversed(least_recent_first(files)):
        left -= file.num_bytes
        if left < 0:
            break
        found.append(file)
    return found


def _read_ahead(files: list[StoredFile]) -> None:
    """Have the system read files while the model is loaded."""
    if not hasattr(os, "posix_fadvise"):  # on macOS
        return
    for file in files:
        with contextlib.suppress(OSError):
            fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)


def _remove_unfinished(folder: Path) -> None:
    """Remove what killed writers have left, which counts for no budget."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not block_file.is_unfinished(entry.name):
                continue
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < time.time() - _UNFINISHED_S:
                    os.unlink(entry.path)


def read_about(folder: Path) -> dict[str, str]:
    """The facts about a namespace, empty if there are none."""
    try:
        about = json.loads((folder / ABOUT_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
