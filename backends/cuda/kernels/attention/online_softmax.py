"""Parts shared by the prefill and decode kernels: arguments, KV tile loads, online softmax."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

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
_TORCH_DTYPES = {"i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn}


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
    num_heads: int, layer_kv: LayerKV, window: int | None, softcap: float | None
) -> dict[str, object]:
    """Return the constexpr arguments shared by both kernels."""
    _, kv_heads, page_tokens, size = layer_kv.keys.shape
    return {
        "num_heads": num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "padded_head_dim": next_power_of_2(size),
        "page_tokens": page_tokens,
        "window": window or 0,
        "quantized": layer_kv.keys.dtype in QUANTIZED_MAX,
        "has_softcap": softcap is not None,
    }


def meta_layer_kv(num_kv_heads: int, head_dim: int, cache_type: str) -> LayerKV:
    """Return a one-page cache on the meta device. cache_type: as in attention_pointer_types."""
    dtype = _TORCH_DTYPES.get(cache_type, torch.bfloat16)
    return LayerKV.zeros((1, num_kv_heads, 16, head_dim), device="meta", dtype=dtype)


@triton.jit
def load_kv_tile(
    kv_pages, scales, page_table, head, tokens, token_mask,
    num_kv_heads: tl.constexpr, head_dim: tl.constexpr, padded_head_dim: tl.constexpr,
    page_tokens: tl.constexpr, quantized: tl.constexpr,
):  # fmt: skip
    """Load cached vectors of one head, [tokens, padded_head_dim], and their scales, [tokens].

    The vectors are not dequantized. page_table: pointer to the page table of the sequence.
    """
    found = tl.load(page_table + tokens // page_tokens, mask=token_mask, other=0).to(tl.int64)
    at = (found * num_kv_heads + head) * page_tokens + tokens % page_tokens
    element = tl.arange(0, padded_head_dim)
    mask = token_mask[:, None] & (element < head_dim)[None, :]
    vectors = tl.load(kv_pages + at[:, None] * head_dim + element[None, :], mask=mask, other=0.0)
    by = 1.0
    if quantized:
        by = tl.load(scales + at, mask=token_mask, other=0.0)
    return vectors, by


@triton.jit
def online_softmax_step(
    q, keys, values, key_scales, value_scales, page_table, head, tokens, end,
    visible_start, visible_end, row_max, row_sum, acc, scale, softcap,
    num_kv_heads: tl.constexpr, head_dim: tl.constexpr, padded_head_dim: tl.constexpr,
    page_tokens: tl.constexpr, quantized: tl.constexpr, has_softcap: tl.constexpr,
):  # fmt: skip
    """Process one more block of tokens; return the updated (row_max, row_sum, acc).

    q: [rows, padded_head_dim]. tokens: [block], masked from `end` on. visible_start, visible_end:
    [rows], the half-open range of tokens a row attends to. row_max, row_sum: float32 [rows],
    largest score in log2 units, and the sum of exponentials relative to it. acc: float32
    [rows, padded_head_dim].
    """
    inside = tokens < end
    k, k_by = load_kv_tile(
        keys,
        key_scales,
        page_table,
        head,
        tokens,
        inside,
        num_kv_heads,
        head_dim,
        padded_head_dim,
        page_tokens,
        quantized,
    )
    # tl.dot needs both operands in one dtype; ieee keeps float32 exact
    scores = tl.dot(q, tl.trans(cast_for_dot(k, q.dtype)), input_precision="ieee") * scale
    if quantized:
        scores *= k_by[None, :]
    if has_softcap:
        # tanh(y) = 2 * sigmoid(2 * y) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    hidden = (tokens[None, :] < visible_start[:, None]) | (tokens[None, :] >= visible_end[:, None])
    scores = tl.where(hidden | (tokens >= end)[None, :], float("-inf"), scores * LOG2E)
    higher = tl.maximum(row_max, tl.max(scores, 1))
    # rows that have seen no token yet: -inf - -inf would be NaN
    level = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp2(scores - level[:, None])
    faded = tl.exp2(row_max - level)
    row_sum = row_sum * faded + tl.sum(shares, 1)
    v, v_by = load_kv_tile(
        values,
        value_scales,
        page_table,
        head,
        tokens,
        inside,
        num_kv_heads,
        head_dim,
        padded_head_dim,
        page_tokens,
        quantized,
    )
    if quantized:
        shares *= v_by[None, :]
    acc = acc * faded[:, None]
    acc += tl.dot(shares.to(q.dtype), cast_for_dot(v, q.dtype), input_precision="ieee")
    return higher, row_sum, acc
