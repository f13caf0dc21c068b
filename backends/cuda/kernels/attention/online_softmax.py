"""Parts shared by the prefill and decode kernels: arguments, KV loads, online softmax of a tile."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.gemm.tile import cast_for_dot
from localgen.backends.cuda.kernels.kv_cache import QUANTIZED_MAX, LayerKV
from localgen.backends.cuda.kernels.launch import next_power_of_2

# the hardware computes exp2
LOG2E = tl.constexpr(1.4426950408889634)
# views of a packed buffer: their alignment varies and must not trigger a recompilation
UNALIGNED_ARGS = ["page_tables", "query_starts", "seq_lens"]
# compute capabilities with 100 KiB of shared memory per SM
SMALL_SHARED_ARCHS = (89, 120)
# per thread: two programs of four warps per SM can have this many
MAX_REGISTERS = 255
_TORCH_DTYPES = {"i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Work of a program of either kernel.

    rows: pairs of a query row and a head. block_tokens: cached tokens per loop iteration.
    num_splits: programs that share the tokens of a sequence; a power of two. max_registers: limit
    per thread, or None for the compiler's choice.
    """

    rows: int
    block_tokens: int
    num_splits: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def attention_pointers(
    queries: Tensor, layer_kv: LayerKV, metadata: AttentionMetadata, out: Tensor
) -> tuple[Tensor, ...]:
    """Return the leading pointer arguments of both kernels."""
    # without scales, pass a placeholder pointer that is not read
    scales = (
        layer_kv.keys if by is None else by for by in (layer_kv.key_scales, layer_kv.value_scales)
    )
    return (
        *(queries, layer_kv.keys, layer_kv.values, *scales),
        *(metadata.page_tables, metadata.query_starts, metadata.seq_lens, out),
    )


def attention_pointer_types(cache_type: str) -> dict[str, str]:
    """Return the Triton types of `attention_pointers`.

    cache_type: Triton type of the cache, such as `bf16`. Queries have the same type, or bf16 if the
    cache is 8-bit.
    """
    small = cache_type in _TORCH_DTYPES
    queries = "*bf16" if small else f"*{cache_type}"
    return {
        "queries": queries,
        **dict.fromkeys(("keys", "values"), f"*{cache_type}"),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32" if small else f"*{cache_type}"),
        **dict.fromkeys(("page_tables", "query_starts", "seq_lens"), "*i32"),
        "out": queries,
    }


def attention_constants(
    num_heads: int,
    cache_shape: torch.Size,
    cache_dtype: torch.dtype,
    window: int | None,
    has_softcap: bool,
    tile: AttentionTile,
) -> dict[str, object]:
    """Return the constexpr arguments of both kernels. cache_shape: that of the keys."""
    _, kv_heads, page_tokens, size = cache_shape
    return {
        "num_heads": num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "padded_head_dim": next_power_of_2(size),
        "page_tokens": page_tokens,
        "tile_rows": tile.rows,
        "block_tokens": tile.block_tokens,
        "window": window or 0,
        "quantized": cache_dtype in QUANTIZED_MAX,
        "has_softcap": has_softcap,
        "is_split": tile.num_splits > 1,
    }


def meta_layer_kv(num_kv_heads: int, head_dim: int, cache_type: str) -> LayerKV:
    """Return a one-page cache on the meta device. cache_type: as in attention_pointer_types."""
    dtype = _TORCH_DTYPES.get(cache_type, torch.bfloat16)
    return LayerKV.zeros((1, num_kv_heads, 16, head_dim), device="meta", dtype=dtype)


@triton.jit
def split_range(begin, end, split, num_splits, block_tokens: tl.constexpr):
    """Return the tokens of [begin, end) that one of num_splits splits has, perhaps none."""
    share = tl.cdiv(tl.cdiv(end - begin, num_splits), block_tokens) * block_tokens
    begin += split * share
    return begin, tl.minimum(begin + share, end)


@triton.jit
def load_kv_tile(
    kv_pages, scales, slots, token_mask,
    head_dim: tl.constexpr, padded_head_dim: tl.constexpr, quantized: tl.constexpr,
    masked: tl.constexpr,
):  # fmt: skip
    """Load cached vectors of one head, [tokens, padded_head_dim], and their scales, [tokens].

    The vectors are not dequantized. slots: int64 [tokens], numbers of the vectors in the cache.
    token_mask: [tokens], used if masked; else all are loaded.
    """
    element = tl.arange(0, padded_head_dim)
    pointers = kv_pages + slots[:, None] * head_dim + element[None, :]
    by = 1.0
    if masked:
        mask = token_mask[:, None] & (element < head_dim)[None, :]
        vectors = tl.load(pointers, mask=mask, other=0.0)
        if quantized:
            by = tl.load(scales + slots, mask=token_mask, other=0.0)
    else:
        if padded_head_dim == head_dim:
            vectors = tl.load(pointers)
        else:
            vectors = tl.load(pointers, mask=(element < head_dim)[None, :], other=0.0)
        if quantized:
            by = tl.load(scales + slots)
    return vectors, by


@triton.jit
def widen_values(x, dtype: tl.constexpr):
    """Cast 8-bit values, [tokens, padded_head_dim], to the operand dtype of tl.dot.

    The detour keeps the compiler from moving the cast behind the rearrangement of the values for
    the tensor cores, which would then read them from shared memory byte by byte.
    """
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    pairs = tl.join(cast_for_dot(even, dtype), cast_for_dot(odd, dtype))
    return tl.reshape(pairs, [x.shape[0], x.shape[1]])


@triton.jit
def online_softmax_blocks(
    q, keys, values, key_scales, value_scales, page_table, kv_head,
    begin, num_blocks, gap_at, gap, end, visible_start, visible_end,
    row_max, row_sum, acc, scale, softcap,
    num_kv_heads: tl.constexpr, head_dim: tl.constexpr, padded_head_dim: tl.constexpr,
    page_tokens: tl.constexpr, block_tokens: tl.constexpr, quantized: tl.constexpr,
    has_softcap: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Process blocks of tokens; return the updated (row_max, row_sum, acc).

    Block i begins at token begin + i * block_tokens, plus gap if i >= gap_at. masked: tokens are
    masked from `end` on, and for rows that do not see them; else all rows see all tokens.
    visible_start, visible_end: [rows], the half-open range of tokens a row sees.

    q: [rows, padded_head_dim]. row_max, row_sum: float32 [rows], largest score in log2 units, and
    the sum of exponentials relative to it. acc: float32 [rows, padded_head_dim].
    """
    offset = tl.arange(0, block_tokens)
    tokens = begin + tl.where(gap_at > 0, 0, gap) + offset
    pages = tl.load(page_table + tokens // page_tokens, mask=tokens < end, other=0)
    for block in range(num_blocks):
        tokens = begin + block * block_tokens + tl.where(block < gap_at, 0, gap) + offset
        inside = tokens < end
        slots = (pages.to(tl.int64) * num_kv_heads + kv_head) * page_tokens + tokens % page_tokens
        # the page ids of the next block: keys and values whose addresses depend on a load of the
        # same iteration are not loaded ahead
        tokens_after = begin + (block + 1) * block_tokens + offset
        tokens_after += tl.where(block + 1 < gap_at, 0, gap)
        pages = tl.load(page_table + tokens_after // page_tokens, mask=tokens_after < end, other=0)
        k, k_by = load_kv_tile(
            keys, key_scales, slots, inside, head_dim, padded_head_dim, quantized, masked
        )
        # tl.dot needs both operands in one dtype; ieee keeps float32 exact
        scores = tl.dot(q, tl.trans(cast_for_dot(k, q.dtype)), input_precision="ieee") * scale
        if quantized:
            scores *= k_by[None, :]
        if has_softcap:
            # tanh(y) = 2 * sigmoid(2 * y) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores *= LOG2E
        if masked:
            seen = (tokens[None, :] >= visible_start[:, None]) & inside[None, :]
            seen &= tokens[None, :] < visible_end[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(row_max, tl.max(scores, 1))
        level = higher
        if masked:
            # rows that have seen no token yet: -inf - -inf would be NaN
            level = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - level[:, None])
        faded = tl.exp2(row_max - level)
        row_sum = row_sum * faded + tl.sum(shares, 1)
        v, v_by = load_kv_tile(
            values, value_scales, slots, inside, head_dim, padded_head_dim, quantized, masked
        )
        if quantized:
            shares *= v_by[None, :]
            v = widen_values(v, q.dtype)
        acc = acc * faded[:, None]
        acc += tl.dot(shares.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        row_max = higher
    return row_max, row_sum, acc


@triton.jit
def attend_tile(
    queries, keys, values, key_scales, value_scales, page_table, out, split_out, split_lse,
    scale, softcap, first_row, num_rows, length, begin_row, kv_head, split, num_splits, partial_row,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    padded_head_dim: tl.constexpr, page_tokens: tl.constexpr, tile_rows: tl.constexpr,
    block_tokens: tl.constexpr, window: tl.constexpr, quantized: tl.constexpr,
    has_softcap: tl.constexpr, is_split: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of one sequence's query rows over one split of its tokens.

    The tile has the rows from begin_row on, each with all query heads of a KV head: they share the
    loads of keys and values. first_row, num_rows: the sequence's rows in the batch. length: its
    tokens. is_split: write to split_out and split_lse instead of `out`, see `combine_splits`;
    partial_row is the place of the sequence's first row there.
    """
    group: tl.constexpr = num_heads // num_kv_heads
    at = tl.arange(0, tile_rows)
    row, head = begin_row + at // group, kv_head * group + at % group
    row_end = tl.minimum(begin_row + tile_rows // group, num_rows)
    live = row < row_end
    # the first row sees tokens up to full_end, the last one up to end
    full_end, end = length - num_rows + begin_row + 1, length - num_rows + row_end
    visible_end = length - num_rows + row + 1
    visible_start = tl.zeros_like(visible_end)
    begin, full_begin = 0, 0
    if window > 0:
        visible_start = tl.maximum(visible_end - window, 0)
        begin = tl.maximum(full_end - window, 0) // block_tokens * block_tokens
        full_begin = tl.maximum(end - window, 0)
    begin, end = split_range(begin, end, split, num_splits, block_tokens)
    partial_at = ((partial_row + row).to(tl.int64) * num_heads + head) * num_splits + split
    if begin < end:
        element = tl.arange(0, padded_head_dim)
        mask = live[:, None] & (element < head_dim)[None, :]
        query_at = ((first_row + row).to(tl.int64) * num_heads + head) * head_dim
        q = tl.load(queries + query_at[:, None] + element[None, :], mask=mask, other=0.0)
        row_max = tl.full([tile_rows], float("-inf"), tl.float32)
        row_sum = tl.zeros([tile_rows], tl.float32)
        acc = tl.zeros([tile_rows, padded_head_dim], tl.float32)
        # every row sees all tokens of the blocks in [low, high); blocks may come in any order
        low = tl.minimum(tl.maximum(tl.cdiv(full_begin, block_tokens) * block_tokens, begin), end)
        high = tl.maximum(tl.minimum(full_end, end) // block_tokens * block_tokens, low)
        before = tl.cdiv(low - begin, block_tokens)
        after = tl.cdiv(end - high, block_tokens)
        row_max, row_sum, acc = online_softmax_blocks(
            q, keys, values, key_scales, value_scales, page_table, kv_head,
            begin, before + after, before, high - low, end, visible_start, visible_end,
            row_max, row_sum, acc, scale, softcap, num_kv_heads, head_dim, padded_head_dim,
            page_tokens, block_tokens, quantized, has_softcap, True,
        )  # fmt: skip
        row_max, row_sum, acc = online_softmax_blocks(
            q, keys, values, key_scales, value_scales, page_table, kv_head,
            low, (high - low) // block_tokens, 0, 0, high, visible_start, visible_end,
            row_max, row_sum, acc, scale, softcap, num_kv_heads, head_dim, padded_head_dim,
            page_tokens, block_tokens, quantized, has_softcap, False,
        )  # fmt: skip
        # rows that saw no token in this split keep row_max -inf, which gives them weight 0 later
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc / row_sum[:, None]
        if is_split:
            tl.store(split_lse + partial_at, row_max + tl.log2(row_sum), mask=live)
            to = split_out + (partial_at * head_dim)[:, None] + element[None, :]
            tl.store(to, acc, mask=mask)
        else:
            to = out + query_at[:, None] + element[None, :]
            tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
    elif is_split:
        tl.store(split_lse + partial_at, float("-inf"), mask=live)
