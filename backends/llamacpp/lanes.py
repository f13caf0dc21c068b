"""Lanes: which of llama.cpp's sequence ids belongs to whom, whatever the cache looks like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from localgen.backends.runner.interface import PoolUsage
from localgen.backends.runner.sequence import Sequence, common_prefix

AnyLane = TypeVar("AnyLane", bound="Lane")


class Lane:
    """One sequence id of llama.cpp: running (it has an owner), kept for its prefix, or free.

    kept: tokens of a donor. used_at: when it was released, by a counter.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.owner: Sequence | None = None
        self.kept: list[int] = []
        self.used_at = 0

    @property
    def tokens(self) -> list[int]:
        """Tokens whose KV is in the cache."""
        return self.owner.tokens[: self.owner.num_computed] if self.owner else self.kept


class Lanes(Protocol):
    """A KV cache dealt out to sequences. See ModelRunner for the calls it shares with that."""

    def index(self, seq: Sequence) -> int:
        """The sequence id of a running sequence."""
        ...

    def admit(self, seq: Sequence, *, spare: int) -> int: ...

    def grow(self, seq: Sequence, n: int) -> bool: ...

    def rewind(self, seq: Sequence, length: int) -> None: ...

    def release(self, seq: Sequence, *, keep: bool) -> None: ...

    def usage(self) -> PoolUsage: ...

    def arrange(self) -> None:
        """Bring the running lanes into the order in which a step is fastest."""
        ...

    def check(self) -> None:
        """Assert that the books are whole and agree with llama.cpp. For tests."""
        ...


def longest_prefix(seq: Sequence, lanes: Iterable[AnyLane]) -> tuple[AnyLane | None, int]:
    """The lane that shares most with `seq`, and how much; one token is always left."""
    usable = seq.tokens[:-1]
    best: AnyLane | None = None
    longest = 0
    for lane in lanes:
        length = common_prefix(lane.tokens, usable)
        if length > longest:
            best, longest = lane, length
    return best, longest
