"""Chained hashes of a prompt's blocks: equal ones where prompts begin alike, and no text.

They are those of traces in Mooncake's format: a hash stands for a block and all blocks before it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 512
# as many as a JSON number keeps in every language
_HASH_BITS = 53


def block_hashes(tokens: Sequence[int], key: bytes, cache_salt: str = "") -> tuple[int, ...]:
    """Return a hash for each block of BLOCK_TOKENS tokens, the last of which may be shorter.

    key: secret of at most 64 bytes, without which a hash says nothing about its tokens. cache_salt:
    only prompts with the same salt have equal hashes.
    """
    chain, found = cache_salt.encode(), []
    for begin in range(0, len(tokens), BLOCK_TOKENS):
        block = array("i", tokens[begin : begin + BLOCK_TOKENS]).tobytes()
        chain = hashlib.blake2b(chain + block, key=key, digest_size=32).digest()
        found.append(int.from_bytes(chain[:8]) >> (64 - _HASH_BITS))
    return tuple(found)
