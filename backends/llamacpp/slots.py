"""Lanes: which of llama.cpp's sequence ids belongs to whom, whatever the cache looks like."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.runner.interface import PoolUsage
from localgen.backends.runner.sequence import Sequence, common_prefix_len

# From this many rows on, llama.cpp's flash attention on the CPU works on whole blocks.
BLOCK_ROWS = 64
# Its cost for a row and a token of context, with blocks and without, as a multiple of the cost
# of a multiplication with weights; measured with 1.2 B parameters in Q4_K_M on two AVX-512 cores.
_BLOCK_ATTENTION_COST, _ROW_ATTENTION_COST = 10.0, 41.0
# below this the attention is too small a part of the work for the choice to matter
_MIN_CONTEXT_TOKENS = 512
AnySlot = TypeVar("AnySlot", bound="CacheSlot")


@dataclass(frozen=True, slots=True)
class PrefixReusePolicy:
    """attention_cost: multiplications per token of context, relative to those with weights.

    0: rows cost the same, however many there are.
    """

    attention_cost: float

    @classmethod
    def for_model(cls, model: LlamaModel, options: LlamaOptions) -> PrefixReusePolicy:
        """What holds for this model under these options."""
        types = {options.cache_type_k, options.cache_type_v}
        in_blocks = options.flash_attn != "off" and types in ({"f16"}, {"f32"})
        if options.gpu_layers or not in_blocks:
            return cls(0.0)
        return cls(model.num_layers * model.hidden_size / max(1, model.num_params))

    def reuse_tokens(self, cached_tokens: int, prompt_tokens: int) -> int:
        """How many of `cached_tokens` to reuse for a prompt of `prompt_tokens`.

        All of them, unless the rest is a little short of a block, behind a long context.
        """
        rows = prompt_tokens - cached_tokens
        if cached_tokens < _MIN_CONTEXT_TOKENS or rows >= BLOCK_ROWS:
            return cached_tokens
        context = self.attention_cost * prompt_tokens
        in_block = BLOCK_ROWS * (1 + _BLOCK_ATTENTION_COST * context)
        return (
            prompt_tokens - BLOCK_ROWS
            if in_block < rows * (1 + _ROW_ATTENTION_COST * context)
            else cached_tokens
        )


class CacheSlot:
    """One sequence id of llama.cpp: running (it has an owner), kept for its prefix, or free.

    cached_tokens: tokens of a donor. last_used: when it was released, by a counter.
    """

    def __init__(self, index: int) -> None:
        self.seq_id = index
        self.owner: Sequence | None = None
        self.cached_tokens: list[int] = []
        self.last_used = 0

    @property
    def tokens(self) -> list[int]:
        """Tokens whose KV is in the cache."""
        return self.owner.tokens[: self.owner.num_computed] if self.owner else self.cached_tokens


class SlotCache(Protocol):
    """A KV cache dealt out to sequences. See ModelRunner for the calls it shares with that."""

    def seq_id_of(self, seq: Sequence) -> int:
        """The sequence id of a running sequence."""
        ...

    def admit(self, seq: Sequence, *, spare: int) -> int: ...

    def grow(self, seq: Sequence, n: int) -> bool: ...

    def rewind(self, seq: Sequence, length: int) -> None: ...

    def release(self, seq: Sequence, *, keep: bool) -> None: ...

    def usage(self) -> PoolUsage: ...

    def make_contiguous(self) -> None:
        """Bring the running lanes into the order in which a step is fastest."""
        ...

    def check(self) -> None:
        """Assert that the books are whole and agree with llama.cpp. For tests."""
        ...


def longest_prefix(seq: Sequence, slots: Iterable[AnySlot]) -> tuple[AnySlot | None, int]:
    """The lane that shares most with `seq`, and how much; one token is always left."""
    usable = seq.tokens[:-1]
    best: AnySlot | None = None
    longest = 0
    for lane in slots:
        length = common_prefix_len(lane.tokens, usable)
        if length > longest:
            best, longest = lane, length
    return best, longest
