"""One block in a file: written whole or not at all, and refused if anything about it is wrong.

A file is a header, the token ids, the state, and an HMAC of all of these under a key of the user's:
native code reads the state, so it must be what this program has written.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from localgen.backends.kv_store.blocks import (
    BLOCK_TOKENS,
    DIGEST_BYTES,
    KVBlock,
    TokenArray,
    chain_digest,
)

SUFFIX = ".kv"
UNFINISHED_SUFFIX = ".new"
_MAGIC = b"lgkv0001"
# magic, namespace, parent, start, tokens, compute_ms, bytes of the state
_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}sIIdQ")
_KEY_BYTES = _MAC_BYTES = 32
_KEY_NAME = "key"
_UNFINISHED_NAME = re.compile(rf"\d+-[0-9a-f]{{16}}{re.escape(UNFINISHED_SUFFIX)}")
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class BlockRefused(Exception):
    """A file is no block that this user's localgen has written for this model; says why."""


def file_name(parent: bytes, digest: bytes) -> str:
    return f"{parent.hex()}-{digest.hex()}{SUFFIX}"


def parse_file_name(name: str) -> tuple[bytes, bytes] | None:
    """Parent and digest of a block, or None for the name of another file."""
    parent, _, digest = name.removesuffix(SUFFIX).partition("-")
    if not name.endswith(SUFFIX) or {len(parent), len(digest)} != {2 * DIGEST_BYTES}:
        return None
    try:
        return bytes.fromhex(parent), bytes.fromhex(digest)
    except ValueError:
        return None


def unfinished_name() -> str:
    """A new name for a file that is being written."""
    return f"{os.getpid()}-{secrets.token_hex(8)}{UNFINISHED_SUFFIX}"


def is_unfinished(name: str) -> bool:
    """True for the name of a file that is being written, or whose writer was killed."""
    return _UNFINISHED_NAME.fullmatch(name) is not None


def file_size(block: KVBlock) -> int:
    """Bytes of the file of a block."""
    return _HEADER.size + block.num_bytes + _MAC_BYTES


def block_parts(namespace: bytes, block: KVBlock, key: bytes) -> Iterator[bytes | memoryview[int]]:
    """Yield the content of the file of a block."""
    header = _HEADER.pack(
        _MAGIC,
        namespace,
        block.parent,
        block.start,
        len(block.tokens),
        block.compute_ms,
        block.state.nbytes,
    )
    mac = hmac.new(key, digestmod="sha256")
    for part in (header, block.tokens.tobytes(), block.state.data):
        mac.update(part)
        yield part
    yield mac.digest()


def parse_block(content: bytes, namespace: bytes, key: bytes) -> KVBlock:
    """Return the block with this content of a file, all of it checked. Raises BlockRefused."""
    file = io.BytesIO(content)
    start, compute_ms, parent, tokens, header = _read_head(file, len(content), namespace)
    end = len(content) - _MAC_BYTES
    if not hmac.compare_digest(hmac.digest(key, content[:end], "sha256"), content[end:]):
        raise BlockRefused("it is damaged, or another key wrote it")
    state = np.frombuffer(content, np.uint8, end - len(header), len(header))
    return KVBlock(parent=parent, start=start, tokens=tokens, compute_ms=compute_ms, state=state)


def write_block(folder: Path, namespace: bytes, block: KVBlock, key: bytes) -> None:
    """Write a block durably. Raises OSError."""
    unfinished = folder / unfinished_name()
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            for part in block_parts(namespace, block, key):
                file.write(part)
            file.flush()
            os.fsync(fd)
        unfinished.replace(folder / file_name(block.parent, block.digest))
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_block(path: Path, namespace: bytes, key: bytes) -> KVBlock:
    """Read a block and check all of it. Raises BlockRefused, or OSError."""
    with _open_own(path) as file:
        size = os.fstat(file.fileno()).st_size
        start, compute_ms, parent, tokens, header = _read_head(file, size, namespace)
        state = np.empty(size - file.tell() - _MAC_BYTES, np.uint8)
        if file.readinto(state.data) != state.nbytes:
            raise BlockRefused("it is truncated")
        mac = hmac.new(key, header, "sha256")
        mac.update(state.data)
        if not hmac.compare_digest(mac.digest(), file.read(_MAC_BYTES)):
            raise BlockRefused("it is damaged, or another key wrote it")
    if parse_file_name(path.name) != (parent, chain_digest(parent, tokens)):
        raise BlockRefused("its name is that of another block")
    return KVBlock(parent=parent, start=start, tokens=tokens, compute_ms=compute_ms, state=state)


def read_tokens(path: Path, namespace: bytes) -> TokenArray:
    """The tokens that a block claims to hold; only read_block verifies that. Raises as it does."""
    with _open_own(path) as file:
        return _read_head(file, os.fstat(file.fileno()).st_size, namespace)[3]


def _open_own(path: Path) -> io.FileIO:
    """Open a regular file that only this user can have written."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        if path.is_symlink():
            raise BlockRefused("it is a symbolic link") from error
        raise
    found = os.fstat(fd)
    reason = ""
    if not stat.S_ISREG(found.st_mode):
        reason = "it is no regular file"
    elif found.st_uid != os.getuid():
        reason = "it belongs to another user"
    elif found.st_mode & 0o077:
        reason = "other users may access it"
    if reason:
        os.close(fd)
        raise BlockRefused(reason)
    return io.FileIO(fd, "rb")


def _read_head(
    file: io.FileIO | io.BytesIO, size: int, namespace: bytes
) -> tuple[int, float, bytes, TokenArray, bytes]:
    """Return start, compute_ms, parent and tokens of a file of this size, and the bytes read."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise BlockRefused("it is no block of this version")
    _, found, parent, start, count, compute_ms, state_bytes = _HEADER.unpack(header)
    if found != namespace:
        raise BlockRefused("it is of another model, or another version of llama.cpp")
    if not 0 < count <= BLOCK_TOKENS:
        raise BlockRefused("its number of tokens is wrong")
    if size != _HEADER.size + 4 * count + state_bytes + _MAC_BYTES:
        raise BlockRefused("its size is wrong")
    content = file.read(4 * count)
    return start, compute_ms, parent, np.frombuffer(content, np.int32), header + content


def load_key(folder: Path) -> bytes:
    """The user's key, created if there is none. Raises OSError, or BlockRefused."""
    path = folder / _KEY_NAME
    with contextlib.suppress(FileNotFoundError):
        return read_key(folder)
    unfinished = folder / unfinished_name()
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(fd)
        with contextlib.suppress(FileExistsError):  # another process was first
            path.hardlink_to(unfinished)
    finally:
        unfinished.unlink()
    return read_key(folder)


def read_key(folder: Path) -> bytes:
    """The user's key. Raises FileNotFoundError if there is none, else as load_key."""
    path = folder / _KEY_NAME
    with _open_own(path) as file:
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise BlockRefused(f"{path} has {len(key)} bytes, not {_KEY_BYTES}: remove it")
    return key
