"""Blocks of computed tokens, named by chained hashes: a name covers all tokens up to its end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# a prefix is stored in blocks of this many tokens; only its last block may be shorter
BLOCK_TOKENS = 128
DIGEST_BYTES = 16

State = NDArray[np.uint8]
TokenArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KVBlock:
    """Keys and values of a run of tokens of a prompt.

    parent: digest of the block before it, or the root of its chain. start: position of its first
    token. compute_ms: time that computing its tokens took, or 0 if unknown. state: keys and values
    in a format of the runner that computed them.
    """

    parent: bytes
    start: int
    tokens: TokenArray
    compute_ms: float
    state: State

    @property
    def digest(self) -> bytes:
        return chain_digest(self.parent, self.tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.state.nbytes + self.tokens.nbytes


def namespace_of(parts: Sequence[str | bytes | int]) -> bytes:
    """Digest of all that keys and values depend on besides the tokens. See fingerprint.py."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def chain_root(namespace: bytes, cache_salt: str) -> bytes:
    """Parent of the first block of a prompt. cache_salt: see Sequence."""
    return namespace_of((namespace, cache_salt))


def chain_digest(parent: bytes, tokens: TokenArray) -> bytes:
    """Name of the block of these tokens behind `parent`."""
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()


def token_array(tokens: Sequence[int]) -> TokenArray:
    return np.asarray(tokens, np.int32)
