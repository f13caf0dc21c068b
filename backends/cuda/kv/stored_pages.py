"""Cached pages that are copied to a PrefixStore before they are evicted, and loaded from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence as Seq
from typing import Protocol

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.radix_tree import RadixTree
from localgen.backends.kv_store.blocks import State
from localgen.backends.kv_store.store import (
    MAX_LOAD_S,
    MIN_LOAD_TOKENS,
    MIN_PREFIX_TOKENS,
    FoundBlock,
    PrefixStore,
)


class PageMemory(Protocol):
    """The keys and values of pages."""

    def read_pages(self, pages: Seq[int]) -> State:
        """Keys and values of all layers, uint8 [pages, bytes of a page], in main memory.

        Raises MemoryError, StepFailed.
        """
        ...

    def write_pages(self, pages: Seq[int], state: State) -> None:
        """Replace keys and values of pages by what read_pages returned, before the next step.

        Raises MemoryError, StepFailed.
        """
        ...

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages, given as (source, target), before the next step."""
        ...


class StoredPages:
    """Decides which pages of a prefix tree are saved, and loads those of a prompt."""

    def __init__(self, store: PrefixStore, tree: RadixTree, memory: PageMemory) -> None:
        self.memory = memory
        self._store, self._tree = store, tree
        # pages of the tree that may have to be saved, oldest first, with the position up to which
        # their prefix was saved
        self._unsaved: dict[int, int] = {}
        self._pages: dict[int, None] = {}  # those that may be saved, saved or not
        self._num_losses = 0
        self._reused: set[int] = set()

    # -- loading ----------------------------------------------------------------------------

    def find(
        self, tokens: list[int], cache_salt: str, num_known: int, *, ask_peer: bool
    ) -> list[FoundBlock]:
        """Stored blocks of a prompt that has its first num_known pages in the tree."""
        known = num_known * PAGE_TOKENS
        if len(tokens) - known < MIN_LOAD_TOKENS:
            return []
        found = self._store.find(tokens, cache_salt, ask_peer=ask_peer)
        end = found[-1].start + found[-1].length if found else 0
        if end - known < MIN_LOAD_TOKENS:
            return []
        return [block for block in found if block.start + block.length > known]

    def load(
        self, found: list[FoundBlock], tokens: list[int], table: Seq[int], num_known: int
    ) -> int:
        """Load blocks into the pages of a table; returns how many of its pages hold tokens now."""
        end, deadline_s = num_known, time.perf_counter() + MAX_LOAD_S
        for block in found:
            started_s = time.perf_counter()
            if started_s > deadline_s:
                break
            first = block.start // PAGE_TOKENS
            last = first + block.length // PAGE_TOKENS
            if last <= end:
                continue
            loaded = self._store.load(block, tokens)
            if loaded is None:
                break
            held = loaded[0]
            state = held.state.reshape(len(held.tokens) // PAGE_TOKENS, -1)
            try:
                self.memory.write_pages(table[end:last], state[end - first : last - first])
            except MemoryError:  # of the device: computing needs less
                break
            self._store.record_loaded(*loaded, (last - end) * PAGE_TOKENS, started_s)
            end = last
        return end

    # -- saving -----------------------------------------------------------------------------

    def add(self, pages: Seq[int]) -> None:
        """Note pages that have come into the tree."""
        self._unsaved |= dict.fromkeys(pages, 0)
        self._pages |= dict.fromkeys(pages)

    def mark_reused(self, page: int) -> None:
        """Note that a prompt began with the prefix that ends with this page, most of it."""
        if page not in self._reused:
            self._reused.add(page)
            self._unsaved[page] = 0

    def save_at_release(self) -> None:
        """Save all if other engines fetch from the store."""
        while self._store.is_shared and self.save_next_block():
            pass

    def save_next_block(self) -> bool:
        """Save one block of the newest prefix that has one to save."""
        if self._num_losses != self._store.num_losses:
            self._num_losses = self._store.num_losses
            self._unsaved |= dict.fromkeys(self._pages, 0)
        while self._unsaved and not self._store.is_full:
            if self._save_block(next(reversed(self._unsaved))):
                return True
        return False

    def evict(self, pages: Seq[int]) -> None:
        """Save what these pages are part of, and forget them: they leave the tree."""
        for page in pages:
            while page in self._unsaved and self._save_block(page):
                pass
        for page in pages:
            self._unsaved.pop(page, None)
            self._pages.pop(page, None)
            self._reused.discard(page)

    def _save_block(self, page: int) -> bool:
        """Save one block of the prefix up to a page; if there is none, forget its pages."""
        tokens, pages, salt = self._tree.prefix_of(page)
        unsaved = None
        is_long = self._store.is_shared or len(tokens) >= MIN_PREFIX_TOKENS
        if is_long or not self._reused.isdisjoint(pages[len(pages) // 2 :]):
            unsaved = self._store.next_unsaved(tokens, salt, self._unsaved[page])
        if unsaved is not None:
            end = unsaved.start + len(unsaved.tokens)
            part = pages[unsaved.start // PAGE_TOKENS : end // PAGE_TOKENS]
            with contextlib.suppress(MemoryError):  # of the device
                if self._store.save(unsaved, lambda: self.memory.read_pages(part).ravel()):
                    self._unsaved[page] = end
                    return True
                if self._store.is_full:
                    return False  # it is tried again later
        for each in pages:
            self._unsaved.pop(each, None)
        return False
