"""Sequences that decode together: what a step knows from the one before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import Int32Array, Int64Array
from localgen.backends.runner.decode_step import DecodeStep
from localgen.backends.runner.sequence import Sequence


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """The sequences of successive decode steps, while none joins, ends or is changed.

    slots: of their page tables and sampling parameters, int64. positions: of the tokens that the
    step computes, int32. writable: lengths up to which their pages can be written, int32.
    steps_left: number of steps after the next one that all sequences have room for within their
    maximum length. Negative: one lacks it in the next step.
    """

    seqs: tuple[Sequence, ...]
    slots: Int64Array
    positions: Int32Array
    writable: Int32Array
    steps_left: int

    @classmethod
    def of(cls, step: DecodeStep, cache: PagedCache) -> DecodeBatch:
        """The batch of a step."""
        positions = np.array(step.starts, np.int32)
        # the next step computes the position after that, the last one before the maximum length
        last = np.array([seq.max_len for seq in step.seqs]) - 2
        return cls(
            step.seqs,
            cache.slots(step.seqs),
            positions,
            np.array([cache.writable_tokens(seq) for seq in step.seqs], np.int32),
            int((last - positions).min()),
        )

    def move_to(self, step: DecodeStep) -> bool:
        """Make this the batch of `step`; False if that does not follow the batch's step."""
        if step.seqs is not self.seqs:
            return False
        self.positions += 1
        self.steps_left -= 1
        return bool(step.starts == self.positions.tolist())

    def grow(self, cache: PagedCache) -> bool:
        """Provide pages for the next step; False if the KV cache is full."""
        lengths = self.positions + 2
        for row in np.flatnonzero(lengths > self.writable).tolist():
            if not cache.grow(self.seqs[row], 2):
                return False
            self.writable[row] = cache.writable_tokens(self.seqs[row])
        return True

    def new_pages(self, cache: PagedCache) -> Int32Array | None:
        """The pages that tokens of the next step begin, int32, -1: none. None: no token does."""
        following = self.positions + 1
        begins = following % PAGE_TOKENS == 0
        if not begins.any():
            return None
        return np.where(begins, cache.pages_at(self.slots, following), -1)
