"""Cached pages that are copied to a PrefixStore before they are evicted, and loaded from it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.page_saves import PageCopy, PageSaves
from localgen.backends.cuda.kv.radix_tree import RadixTree
from localgen.backends.kv_store.blocks import KVBlock, State
from localgen.backends.kv_store.prefix_load import PrefixLoad, blocks_after
from localgen.backends.kv_store.store import MIN_PREFIX_TOKENS, PrefixStore, UnsavedBlock


class PageMemory(Protocol):
    """The keys and values of pages."""

    def read_pages(self, pages: Seq[int]) -> PageCopy:
        """Start to copy pages, as the steps launched so far leave them, and wait for none.

        What is launched afterwards may change the pages. Raises MemoryError, StepFailed.
        """
        ...

    def write_pages(self, pages: Seq[int], state: State) -> None:
        """Replace keys and values of pages by what read_pages has copied, before the next step.

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
        self._saves = PageSaves(store)
        # pages of the tree that may have to be saved, oldest first, with the position up to which
        # their prefix was saved
        self._unsaved: dict[int, int] = {}
        self._pages: dict[int, None] = {}  # those that may be saved, saved or not
        self._num_losses = 0
        self._reused: set[int] = set()
        store.count_unsaved = self._num_unsaved
        store.on_cleared = self._forget_all

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
        None to ask none. Blocks whose copies are in flight are not waited for, nor loaded.
        """
        while self._saves.store_oldest(wait=False):
            pass
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
            self.add([page])

    def _num_unsaved(self) -> int:
        """Upper bound of the number of tokens to save."""
        return len(self._unsaved) * PAGE_TOKENS + self._saves.num_tokens

    def save_at_release(self) -> None:
        """Save all if other engines fetch from the store, who may ask for it at once."""
        while self._store.is_shared and self.save_next_block(may_wait=True):
            pass

    def save_next_block(self, *, may_wait: bool) -> bool:
        """Start to copy a block of the newest prefix that has one to save, or store a copied one.

        may_wait: for a copy, if nothing else is left to do. Returns False if nothing was done.
        """
        self._look_again()
        if not self._saves.is_full and self._start_next():
            return True
        return self._saves.store_oldest(wait=may_wait)

    def _look_again(self) -> None:
        """Consider all pages again if stored blocks were lost, or found no room."""
        if self._num_losses != self._store.num_losses:
            self._num_losses = self._store.num_losses
            self._unsaved |= dict.fromkeys(self._pages, 0)

    def _forget_all(self) -> None:
        """Save no page that is in the tree, until a request uses it."""
        self._saves.forget()
        for pages in (self._unsaved, self._pages, self._reused):
            pages.clear()

    def _start_next(self) -> bool:
        while self._unsaved and not self._store.is_full:
            if self._start_block(next(reversed(self._unsaved))):
                return True
        return False

    def evict(self, pages: Seq[int], *, save: bool) -> None:
        """Forget pages, which leave the tree. save: start to save what they are part of before."""
        for page in pages if save else ():
            while page in self._unsaved:
                self._start_block(page)
        for page in pages:
            self._unsaved.pop(page, None)
            self._pages.pop(page, None)
            self._reused.discard(page)

    def _start_block(self, page: int) -> bool:
        """Copy one block of the prefix up to a page; if there is none, forget its pages."""
        tokens, pages, salt = self._tree.prefix_of(page)
        unsaved = None
        is_long = self._store.is_shared or len(tokens) >= MIN_PREFIX_TOKENS
        if is_long or not self._reused.isdisjoint(pages[len(pages) // 2 :]):
            unsaved = self._store.next_unsaved(
                tokens, salt, self._unsaved[page], self._saves.blocks
            )
        copy = None if unsaved is None else self._copy(unsaved, pages)
        if unsaved is None or copy is None:
            for each in pages:
                self._unsaved.pop(each, None)
            return False
        self._unsaved[page] = unsaved.start + len(unsaved.tokens)
        self._saves.add(unsaved, tokens, salt, copy)
        return True

    def _copy(self, block: UnsavedBlock, pages: list[int]) -> PageCopy | None:
        """Start to copy a block of a prefix; None if the device has no memory for it."""
        if self._saves.is_full:  # a long prefix is evicted of which nothing was saved
            self._saves.store_oldest(wait=True)
        end = block.start + len(block.tokens)
        try:
            return self.memory.read_pages(pages[block.start // PAGE_TOKENS : end // PAGE_TOKENS])
        except MemoryError:
            return None
