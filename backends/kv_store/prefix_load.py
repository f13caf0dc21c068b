"""Loads the stored part of a prompt into a KV cache, a few blocks at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from localgen.backends.kv_store.blocks import KVBlock
from localgen.backends.kv_store.peer import KVPeer
from localgen.backends.kv_store.store import FoundBlock, PrefixStore

# fewer tokens than this are computed, not loaded
MIN_LOAD_TOKENS = 8
# loading may take longer than computing by this time, which tells a slow disk from a slow start
PATIENCE_MS = 100.0
# after a refused block, those behind it are looked at for this time
REPLACING_MS = 1000.0


def blocks_after(
    store: PrefixStore,
    tokens: list[int],
    cache_salt: str,
    num_cached: int,
    *,
    usable: Callable[[int], int],
    peer: KVPeer | None,
) -> list[FoundBlock]:
    """Stored blocks for the tokens of a prompt behind its first `num_cached` ones.

    The first may begin before that. usable: how many of so many leading tokens to load.
    peer: an engine to ask for what is not stored here.
    """
    if len(tokens) - num_cached < MIN_LOAD_TOKENS:
        return []
    found = store.find(tokens, cache_salt, peer=peer)
    end = usable(found[-1].start + found[-1].length) if found else 0
    if end - num_cached < MIN_LOAD_TOKENS:
        return []
    return [
        block._replace(length=min(block.length, end - block.start))
        for block in found
        if block.start < end and block.start + block.length > num_cached
    ]


class PrefixLoad:
    """The blocks of a prompt that are left to load.

    blocks: in order. num_loaded: leading tokens of the prompt in the KV cache, which grows. put:
    adds the tokens of a block from one position to another; returns False if that is impossible.
    """

    def __init__(
        self,
        store: PrefixStore,
        tokens: list[int],
        blocks: Iterable[FoundBlock],
        num_loaded: int,
        put: Callable[[KVBlock, int, int], bool],
    ) -> None:
        self.num_loaded = num_loaded
        self._store, self._tokens, self._put = store, tokens, put
        self._left = deque(blocks)
        self._excess_ms = 0.0  # by which loading took longer than computing
        self._is_broken = False  # a block was refused

    @property
    def is_done(self) -> bool:
        return not self._left

    def advance(self, until_s: float) -> None:
        """Load at least one block, and more until a time (monotonic seconds)."""
        while self._left:
            if not self._load(self._left.popleft()):
                self._left.clear()
            if time.monotonic() >= until_s:
                return

    def _load(self, found: FoundBlock) -> bool:
        """Load a block. Returns False if the tokens after it, or its own, are to be computed.

        Those behind a refused block are only read, so that each that would be refused is replaced
        by what is computed now.
        """
        started_s = time.perf_counter()
        if self._is_broken:
            self._store.load(found._replace(peer=None), self._tokens)
            self._excess_ms += (time.perf_counter() - started_s) * 1e3
            return self._excess_ms <= REPLACING_MS
        num_refused = self._store.num_refused
        loaded = self._store.load(found, self._tokens)
        end = found.start + found.length
        if loaded is None:
            self._is_broken = self._store.num_refused > num_refused
            return self._is_broken
        if not self._put(loaded[0], self.num_loaded, end):
            return False
        block, tier = loaded
        num_tokens, self.num_loaded = end - self.num_loaded, end
        ms = (time.perf_counter() - started_s) * 1e3
        compute_ms = block.compute_ms * num_tokens / len(block.tokens)
        self._store.record_restored(tier, num_tokens, ms, compute_ms)
        self._excess_ms += ms - (compute_ms or ms)
        return self._excess_ms <= PATIENCE_MS
