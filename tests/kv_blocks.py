"""Blocks whose state tells which tokens it stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from localgen.backends.kv_store.blocks import (
    BLOCK_TOKENS,
    KVBlock,
    State,
    TokenArray,
    chain_root,
    token_array,
)
from localgen.backends.kv_store.disk_tier import DiskTier
from localgen.backends.kv_store.store import PrefixStore

NAMESPACE = bytes(range(16))
STATE_BYTES = 1000


def state_of(parent: bytes, tokens: TokenArray) -> State:
    """What only these tokens behind this parent have."""
    seed = hashlib.sha256(parent + tokens.tobytes()).digest()
    return np.frombuffer(seed * (STATE_BYTES // len(seed) + 1), np.uint8)[:STATE_BYTES].copy()


def block_of(parent: bytes, tokens: list[int], start: int = 0) -> KVBlock:
    ids = token_array(tokens)
    state = state_of(parent, ids)
    return KVBlock(parent=parent, start=start, tokens=ids, compute_ms=1000.0, state=state)


def chain(tokens: list[int], salt: str = "", namespace: bytes = NAMESPACE) -> Iterator[KVBlock]:
    """The blocks of a prompt."""
    parent = chain_root(namespace, salt)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = block_of(parent, tokens[start : start + BLOCK_TOKENS], start)
        yield block
        parent = block.digest


def disk_tier(folder: Path, limit: int = 1 << 30, namespace: bytes = NAMESPACE) -> DiskTier:
    return DiskTier(folder, namespace, limit, {"model": "echo"})


def save_all(store: PrefixStore, tokens: list[int], salt: str = "") -> None:
    """Save a computed prompt as a KV cache does."""
    end = 0
    while (unsaved := store.next_unsaved(tokens, salt, end)) is not None:
        parent, ids = unsaved.parent, unsaved.tokens
        end = unsaved.start + len(ids)
        if not store.save(unsaved, lambda parent=parent, ids=ids: state_of(parent, ids)):  # type: ignore[misc]
            return


def load_all(store: PrefixStore, tokens: list[int], salt: str = "") -> int:
    """Load a prompt as a KV cache does, and check each block; returns the tokens loaded."""
    length = 0
    for found in store.find(tokens, salt):
        loaded = store.load(found, tokens)
        if loaded is None:
            break
        block, _ = loaded
        assert found.start == length
        assert block.tokens[: found.length].tolist() == tokens[length : length + found.length]
        assert (block.state == state_of(block.parent, block.tokens)).all()
        length += found.length
    return length
