"""Cached pages that are copied to a PrefixStore before they are evicted, and loaded from it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Seq
from typing import Protocol

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.radix_tree import RadixTree
from localgen.backends.kv_store.blocks import KVBlock, State
from localgen.backends.kv_store.prefix_load import PrefixLoad, blocks_after
from localgen.backends.kv_store.store import MIN_PREFIX_TOKENS, PrefixStore


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
        store.count_unsaved = self._num_unsaved

    # -- loading ----------------------------------------------------------------------------

    def load(
        self,
        tokens: list[int],
        cache_salt: str,
        table: Seq[int],
        num_cached: int,
        *,
        peer: str | None,
    ) -> PrefixLoad | None:
        """The stored blocks of a prompt after its first num_cached tokens; None if there are none.

        table: page table of the sequence that they are loaded into. peer: as in PrefixStore.peer;
        None to ask none.
        """
        blocks = blocks_after(
            self._store,
            tokens,
            cache_salt,
            num_cached,
            usable=lambda end: end // PAGE_TOKENS * PAGE_TOKENS,
            peer=None if peer is None else self._store.peer(peer),
        )

        def put(block: KVBlock, start: int, end: int) -> bool:
            state = block.state.reshape(len(block.tokens) // PAGE_TOKENS, -1)
            first, last = start // PAGE_TOKENS, end // PAGE_TOKENS
            offset = block.start // PAGE_TOKENS
            try:
                self.memory.write_pages(table[first:last], state[first - offset : last - offset])
            except MemoryError:  # of the device: computing needs less
                return False
            return True

        return PrefixLoad(self._store, tokens, blocks, num_cached, put) if blocks else None

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

    def _num_unsaved(self) -> int:
        """Upper bound of the number of tokens to save."""
        return len(self._unsaved) * PAGE_TOKENS

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

    def evict(self, pages: Seq[int], *, save: bool) -> None:
        """Forget pages, which leave the tree. save: what they are part of is saved before."""
        for page in pages if save else ():
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
