"""Slots: the assignment of llama.cpp's sequence ids to sequences, for either cache layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.runner.interface import PoolUsage
from localgen.backends.runner.sequence import Sequence, common_prefix_len

# From this many rows on, llama.cpp's flash attention on the CPU computes whole blocks.
BLOCK_ROWS = 64
# Attention cost per row and context token, with and without blocks, relative to the cost of a
# multiplication by weights; measured with 1.2 B parameters in Q4_K_M on two AVX-512 cores.
_BLOCK_ATTENTION_COST, _ROW_ATTENTION_COST = 10.0, 41.0
# below this length, attention is too small a part of the work to matter
_MIN_CONTEXT_TOKENS = 512
AnySlot = TypeVar("AnySlot", bound="CacheSlot")


@dataclass(frozen=True, slots=True)
class PrefixReusePolicy:
    """Decides how much of a cached prefix to reuse.

    attention_cost: multiplications per context token, relative to those by weights. 0 means that
    the cost of a row does not depend on the number of rows.
    """

    attention_cost: float

    @classmethod
    def for_model(cls, model: LlamaModel, options: LlamaOptions) -> PrefixReusePolicy:
        """The policy for a model under these options."""
        types = {options.cache_type_k, options.cache_type_v}
        in_blocks = options.flash_attn != "off" and types in ({"f16"}, {"f32"})
        if options.gpu_layers or not in_blocks:
            return cls(0.0)
        return cls(model.num_layers * model.hidden_size / max(1, model.num_params))

    def reuse_tokens(self, cached_tokens: int, prompt_tokens: int) -> int:
        """Number of cached tokens to reuse for a prompt.

        All of them, unless the remainder is slightly shorter than a block behind a long prefix:
        then recomputing a few tokens to fill the block is faster.
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
    """A sequence id of llama.cpp: running (it has an owner), cached for its prefix, or free.

    cached_tokens: tokens of a cached prefix. cache_salt: of the sequence that computed them.
    last_used: a counter value, set on release.
    """

    def __init__(self, index: int) -> None:
        self.seq_id = index
        self.owner: Sequence | None = None
        self.cached_tokens: list[int] = []
        self.cache_salt = ""
        self.last_used = 0

    @property
    def tokens(self) -> list[int]:
        return self.owner.tokens[: self.owner.num_computed] if self.owner else self.cached_tokens

    def start(self, seq: Sequence) -> None:
        """Make the sequence its owner."""
        self.owner, self.cached_tokens, self.cache_salt = seq, [], seq.cache_salt

    def has_prefix_of(self, other: CacheSlot) -> bool:
        """True if it caches a prefix of what the other slot caches: then it serves no request that
        the other does not serve."""
        return (
            self is not other
            and self.cache_salt == other.cache_salt
            and 0 < len(self.cached_tokens) <= len(other.cached_tokens)
            and self.cached_tokens == other.cached_tokens[: len(self.cached_tokens)]
        )


class SlotCache(Protocol):
    """A KV cache divided among sequences. For the methods of ModelRunner and
    TieredRunner, see there."""

    def seq_id_of(self, seq: Sequence) -> int:
        """Sequence id of a running sequence."""
        ...

    def admit(self, seq: Sequence, *, spare: int) -> int: ...

    def num_cached(self, tokens: list[int], cache_salt: str) -> int: ...

    def grow(self, seq: Sequence, n: int) -> bool: ...

    def rewind(self, seq: Sequence, length: int) -> None: ...

    def release(self, seq: Sequence, *, keep: bool) -> None: ...

    def usage(self) -> PoolUsage: ...

    def is_loading(self, seq: Sequence) -> bool: ...

    def load_prefix(self, seq: Sequence, until_s: float) -> int: ...

    def save_next_block(self) -> bool: ...

    def make_contiguous(self) -> None:
        """Arrange the running slots in the order in which a step is fastest."""
        ...

    def check(self) -> None:
        """Assert that the bookkeeping is consistent and agrees with llama.cpp. For tests."""
        ...


def longest_prefix(
    tokens: list[int], cache_salt: str, slots: Iterable[AnySlot]
) -> tuple[AnySlot | None, int]:
    """Return the slot of that salt with the longest common prefix with tokens, and its length."""
    best: AnySlot | None = None
    longest = 0
    for slot in slots:
        if slot.cache_salt != cache_salt:
            continue
        length = common_prefix_len(slot.tokens, tokens)
        if length > longest:
            best, longest = slot, length
    return best, longest
