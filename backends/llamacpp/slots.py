"""Lanes: which of llama.cpp's sequence ids belongs to whom, whatever the cache looks like."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from localgen.backends.llamacpp.native import Model
from localgen.backends.llamacpp.options import Settings
from localgen.backends.runner.interface import PoolUsage
from localgen.backends.runner.sequence import Sequence, common_prefix

# From this many rows on, llama.cpp's flash attention on the CPU works on whole blocks.
BLOCK_ROWS = 64
# Its cost for a row and a token of context, with blocks and without, as a multiple of the cost
# of a multiplication with weights; measured with 1.2 B parameters in Q4_K_M on two AVX-512 cores.
_IN_BLOCKS, _ROW_BY_ROW = 10.0, 41.0
# below this the attention is too small a part of the work for the choice to matter
_LEAST_CONTEXT = 512
AnyLane = TypeVar("AnyLane", bound="Lane")


@dataclass(frozen=True, slots=True)
class Reuse:
    """attention: multiplications per token of context, relative to those with weights.

    0: rows cost the same, however many there are.
    """

    attention: float

    @classmethod
    def of(cls, model: Model, options: Settings) -> Reuse:
        """What holds for this model under these options."""
        types = {options.cache_type_k, options.cache_type_v}
        in_blocks = options.flash_attn != "off" and types in ({"f16"}, {"f32"})
        if options.gpu_layers or not in_blocks:
            return cls(0.0)
        return cls(model.layers * model.width / max(1, model.num_params))

    def length(self, known: int, total: int) -> int:
        """How many of `known` tokens to reuse for a prompt of `total`.

        All of them, unless the rest is a little short of a block, behind a long context.
        """
        rows = total - known
        if known < _LEAST_CONTEXT or rows >= BLOCK_ROWS:
            return known
        context = self.attention * total
        in_block = BLOCK_ROWS * (1 + _IN_BLOCKS * context)
        return total - BLOCK_ROWS if in_block < rows * (1 + _ROW_BY_ROW * context) else known


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
