"""What both attention kernels do: scores of some tokens of the cache, and the online softmax; and
what both are given and compiled with."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.attention_metadata import Ragged
from localgen.backends.cuda.kernels.gemm.tile import as_operand
from localgen.backends.cuda.kernels.kv_cache import LARGEST, LayerKV

# exp2 is what the hardware has
LOG2E = tl.constexpr(1.4426950408889634)
# parts of a packed copy: where they begin must not decide what is compiled
UNALIGNED = ["tables", "starts", "lengths"]
_TYPES = {"i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn}


def pointers(queries: Tensor, cache: LayerKV, ragged: Ragged, out: Tensor) -> tuple[Tensor, ...]:
    """The first arguments of both kernels."""
    # where there are no scales, any pointer does: it is not read
    scales = (cache.keys if by is None else by for by in (cache.key_scales, cache.value_scales))
    return (
        *(queries, cache.keys, cache.values, *scales),
        *(ragged.tables, ragged.starts, ragged.lengths, out),
    )


def pointer_types(kind: str) -> dict[str, str]:
    """Triton's types of these. kind: that of the cache, as in `bf16`; bf16 queries if it is eight
    bits wide."""
    small = kind in _TYPES
    queries = "*bf16" if small else f"*{kind}"
    return {
        "queries": queries,
        **dict.fromkeys(("keys", "values"), f"*{kind}"),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32" if small else f"*{kind}"),
        **dict.fromkeys(("tables", "starts", "lengths"), "*i32"),
        "out": queries,
    }


def constants(
    heads: int, cache: LayerKV, window: int | None, softcap: float | None
) -> dict[str, object]:
    """What both kernels are compiled with."""
    _, kv_heads, page, size = cache.keys.shape
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "size": size,
        "block_size": triton.next_power_of_2(size),
        "page": page,
        "window": window or 0,
        "quantized": cache.keys.dtype in LARGEST,
        "capped": softcap is not None,
    }


def example(kv_heads: int, size: int, kind: str) -> LayerKV:
    """A cache of nothing, to compile for. kind: as that of pointer_types."""
    dtype = _TYPES.get(kind, torch.bfloat16)
    return LayerKV.zeros((1, kv_heads, 16, size), device="meta", dtype=dtype)


@triton.jit
def cached(
    pages, scales, table, head, tokens, inside, heads: tl.constexpr, size: tl.constexpr,
    block_size: tl.constexpr, page: tl.constexpr, quantized: tl.constexpr,
):  # fmt: skip
    """Vectors [tokens, block_size] of a head of the cache, as stored, and the scales [tokens].

    table: where the pages of the sequence are listed.
    """
    found = tl.load(table + tokens // page, mask=inside, other=0).to(tl.int64)
    at = (found * heads + head) * page + tokens % page
    element = tl.arange(0, block_size)
    mask = inside[:, None] & (element < size)[None, :]
    vectors = tl.load(pages + at[:, None] * size + element[None, :], mask=mask, other=0.0)
    by = 1.0
    if quantized:
        by = tl.load(scales + at, mask=inside, other=0.0)
    return vectors, by


@triton.jit
def attend(
    q, keys, values, key_scales, value_scales, table, head, tokens, end, seen_from, seen_to,
    peak, total, mixed, scale, softcap,
    heads: tl.constexpr, size: tl.constexpr, block_size: tl.constexpr, page: tl.constexpr,
    quantized: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    """One block of tokens more: the new (peak, total, mixed).

    q: [rows, block_size]. tokens: [block], those from `end` on do not exist. seen_from, seen_to:
    [rows], first token that a row sees, and the one behind its last. peak, total: float32 [rows],
    largest score, in powers of 2, and sum relative to it. mixed: float32 [rows, block_size].
    """
    inside = tokens < end
    k, k_by = cached(
        keys, key_scales, table, head, tokens, inside, heads, size, block_size, page, quantized
    )
    # on a tensor core both sides are of one type; exact types stay exact
    scores = tl.dot(q, tl.trans(as_operand(k, q.dtype)), input_precision="ieee") * scale
    if quantized:
        scores *= k_by[None, :]
    if capped:
        # tanh y is 2 sigmoid(2 y) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    hidden = (tokens[None, :] < seen_from[:, None]) | (tokens[None, :] >= seen_to[:, None])
    scores = tl.where(hidden | (tokens >= end)[None, :], float("-inf"), scores * LOG2E)
    higher = tl.maximum(peak, tl.max(scores, 1))
    # a row that has seen nothing yet: -inf less -inf would be no number
    level = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp2(scores - level[:, None])
    faded = tl.exp2(peak - level)
    total = total * faded + tl.sum(shares, 1)
    v, v_by = cached(
        values, value_scales, table, head, tokens, inside, heads, size, block_size, page, quantized
    )
    if quantized:
        shares *= v_by[None, :]
    mixed = mixed * faded[:, None]
    mixed += tl.dot(shares.to(q.dtype), as_operand(v, q.dtype), input_precision="ieee")
    return higher, total, mixed
