"""fake_runner's model over a PagedCache: it reads tokens from the pages only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from fake_runner import next_token
from numpy.typing import NDArray

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.interface import Chunk, Limits, PoolUsage, SampledTokens
from localgen.backends.runner.sequence import Sequence

EMPTY = -1


class LateCopy:
    """A copy of pages that is done once `memory.finishes` returns True, or was waited for."""

    def __init__(self, state: NDArray[np.uint8], memory: Memory) -> None:
        self._state, self._memory = state, memory
        self.num_waits = 0
        self._is_done = False

    @property
    def is_done(self) -> bool:
        self._is_done = self._is_done or self._memory.finishes()
        return self._is_done

    def wait(self) -> NDArray[np.uint8]:
        self.num_waits += not self._is_done
        return self._state


class Memory:
    """Pages that hold tokens in place of keys and values. store: of the cache's prefixes.

    finishes: says whether a copy that is in flight is done by now. copies: all that were started.
    """

    def __init__(self, num_pages: int, *, share: bool, store: PrefixStore | None = None) -> None:
        self.cache = PagedCache(num_pages, prefix_cache=share, store=store, memory=self)
        self.pages = np.full((num_pages, PAGE_TOKENS), EMPTY)
        self.finishes: Callable[[], bool] = lambda: True
        self.copies: list[LateCopy] = []

    def copy(self) -> int:
        """Make the pending copies; returns how many."""
        copies: list[tuple[int, int]] = []
        self.cache.copy_pending(copies.extend)
        self.copy_pages(copies)
        return len(copies)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        assert len(set(targets)) == len(targets)
        self.pages[targets] = self.pages[sources]

    def read_pages(self, pages: Seq[int]) -> LateCopy:
        self.copies.append(LateCopy(self.pages[list(pages)].view(np.uint8), self))
        return self.copies[-1]

    def write_pages(self, pages: Seq[int], state: NDArray[np.uint8]) -> None:
        self.pages[list(pages)] = np.ascontiguousarray(state).view(self.pages.dtype)

    def write(self, seq: Sequence, start: int, tokens: Seq[int]) -> None:
        table = self.cache.page_table(seq)
        for position, token in enumerate(tokens, start):
            self.pages[table[position // PAGE_TOKENS], position % PAGE_TOKENS] = token

    def read(self, seq: Sequence, length: int) -> list[int]:
        tokens: list[int] = self.pages[self.cache.page_table(seq)].ravel()[:length].tolist()
        return tokens

    def check(self, seqs: Seq[Sequence]) -> None:
        """Assert that all sequences' computed tokens are still in their pages."""
        self.cache.check()
        for seq in seqs:
            assert self.read(seq, seq.num_computed) == seq.tokens[: seq.num_computed]


class PagedRunner:
    """ModelRunner that checks the pages at every call and counts events in `seen`."""

    def __init__(
        self,
        *,
        num_pages: int,
        max_seqs: int,
        batch: int,
        share: bool,
        store: PrefixStore | None = None,
    ) -> None:
        self.limits = Limits(
            max_seqs=max_seqs,
            max_batch_tokens=batch,
            max_outputs=batch,
            max_len=num_pages * PAGE_TOKENS,
            kv_tokens=num_pages * PAGE_TOKENS,
            can_rewind=share,
        )
        self.store = store
        self.memory = Memory(num_pages, share=share, store=store)
        self.cache = self.memory.cache
        self.seen: Counter[str] = Counter()

    def usage(self) -> PoolUsage:
        return self.cache.usage()

    def admit(self, seq: Sequence, *, spare: int) -> int:
        before = self.usage()
        try:
            cached = self.cache.admit(seq, spare=spare)
        finally:
            self.cache.check()
        assert len(self.cache.page_table(seq)) == pages_for(len(seq.tokens))
        assert cached < len(seq.tokens)
        assert self.memory.read(seq, cached) == seq.tokens[:cached]
        after = self.usage()
        assert after.free + after.cached >= spare
        self.seen["hits"] += cached
        self.seen["evicted"] += after.used - before.used > before.free
        return cached

    def is_loading(self, seq: Sequence) -> bool:
        return self.cache.is_loading(seq)

    def load_prefix(self, seq: Sequence, until_s: float) -> int:
        loaded = self.cache.load_prefix(seq, until_s)
        self.cache.check()
        assert seq.num_computed <= loaded < len(seq.tokens)
        assert self.memory.read(seq, loaded) == seq.tokens[:loaded]
        self.seen["slices"] += 1
        return loaded

    def save_next_block(self) -> bool:
        return self.cache.save_next_block()

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return self.cache.num_cached(tokens, cache_salt)

    def grow(self, seq: Sequence, n: int) -> bool:
        held = len(self.cache.page_table(seq))
        grown = self.cache.grow(seq, n)
        self.cache.check()
        needed = pages_for(seq.num_computed + n)
        assert len(self.cache.page_table(seq)) == (max(held, needed) if grown else held)
        return grown

    def launch(self, chunks: Seq[Chunk]) -> Seq[Chunk]:
        self.memory.copy()
        return chunks

    def collect(self, ticket: Seq[Chunk]) -> list[SampledTokens]:
        for chunk in ticket:
            self.memory.write(chunk.seq, chunk.start, chunk.tokens)
        return [self._sample(chunk) for chunk in ticket]

    def _sample(self, chunk: Chunk) -> SampledTokens:
        text = self.memory.read(chunk.seq, chunk.start + len(chunk))
        assert text == chunk.seq.tokens[: chunk.start] + chunk.tokens, "no page is another's"
        if not chunk.is_sampled:
            return SampledTokens()
        tokens: list[int] = []
        drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
        for offset in range(chunk.num_drafts + 1):
            tokens.append(next_token(text[: len(text) - chunk.num_drafts + offset]))
            if offset < chunk.num_drafts and drafts[offset] != tokens[-1]:
                self.seen["rejected"] += 1
                break
        return SampledTokens(tuple(tokens))

    def rewind(self, seq: Sequence, length: int) -> None:
        assert self.limits.can_rewind
        self.cache.rewind(seq, length)
        self.cache.check()
        assert len(self.cache.page_table(seq)) == pages_for(length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        self.cache.release(seq, keep=keep)
        self.cache.check()

    def close(self) -> None:
        """Nothing to free."""
