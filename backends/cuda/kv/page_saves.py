"""Blocks of cached pages on their way to a PrefixStore: copied beside steps, stored in order."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import NamedTuple, Protocol

from localgen.backends.kv_store.blocks import State
from localgen.backends.kv_store.store import PrefixStore, UnsavedBlock

# each takes memory until it is stored, and pinned memory and that of the device until it is copied:
# 16 MB for an 8B model
MAX_IN_FLIGHT = 4


class PageCopy(Protocol):
    """A copy of pages to main memory, which may be in flight."""

    @property
    def is_done(self) -> bool:
        """False if `wait` would wait."""
        ...

    def wait(self) -> State:
        """Keys and values of all layers, uint8 [pages, bytes of a page], in ordinary memory.

        Raises MemoryError, StepFailed.
        """
        ...


class _Save(NamedTuple):
    block: UnsavedBlock
    tokens_before: list[int]
    salt: str
    copy: PageCopy


class PageSaves:
    """Blocks whose pages are being copied.

    They are stored in the order in which they were added, so each comes after the one it follows.
    """

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._in_flight: deque[_Save] = deque()

    @property
    def blocks(self) -> list[UnsavedBlock]:
        """Blocks that are not stored yet, oldest first."""
        return [save.block for save in self._in_flight]

    @property
    def num_tokens(self) -> int:
        """Tokens of these blocks."""
        return sum(len(block.tokens) for block in self.blocks)

    @property
    def is_full(self) -> bool:
        """True if one has to be stored before another is added."""
        return len(self._in_flight) >= MAX_IN_FLIGHT

    def add(self, block: UnsavedBlock, tokens: list[int], salt: str, copy: PageCopy) -> None:
        """Add a block of a prefix of these tokens; store the oldest one if it is copied."""
        assert not self.is_full
        self._in_flight.append(_Save(block, tokens[: block.start], salt, copy))
        self.store_oldest(wait=False)

    def forget(self) -> None:
        """Store none of them."""
        self._in_flight.clear()

    def store_oldest(self, *, wait: bool) -> bool:
        """Store the oldest block.

        wait: for its copy. Returns False if there is none, or if its copy is not done. Raises
        StepFailed.
        """
        if not self._in_flight or not (wait or self._in_flight[0].copy.is_done):
            return False
        save = self._in_flight.popleft()
        # so those before it count as used, and RAM drops them last
        before = self._store.find(save.tokens_before, save.salt)
        if sum(found.length for found in before) == save.block.start:  # else one found no room
            with contextlib.suppress(MemoryError):
                self._store.save(save.block, lambda: save.copy.wait().ravel())
        return True
