"""Prefill attention: tiles of query rows over cached pages (FlashAttention-2, Dao 2023)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.attention.online_softmax import (
    UNALIGNED_ARGS,
    attention_constants,
    attention_pointer_types,
    attention_pointers,
    meta_layer_kv,
    online_softmax_step,
)
from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.device import ARCHS, compute_capability
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.launch import Variant, launch


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Tile of a program. rows: query rows. block_tokens: cached tokens per loop iteration."""

    rows: int
    block_tokens: int
    num_warps: int
    num_stages: int


# wgmma leaves enough registers for larger blocks of tokens
_HOPPER_ARCH = 90


def choose_prefill_tile(head_dim: int, max_query_len: int, arch: int) -> PrefillTile:
    """Return the largest tile that registers and 99 KiB of shared memory allow.

    arch: compute capability of the GPU.
    """
    if head_dim > 128:
        return PrefillTile(64, 32, 8, 2)
    if max_query_len <= 64:
        return PrefillTile(64, 32, 4, 2)
    return PrefillTile(128, 64 if arch == _HOPPER_ARCH else 32, 8, 2)


def prefill_attention_triton(
    queries: Tensor,
    layer_kv: LayerKV,
    metadata: AttentionMetadata,
    out: Tensor,
    *,
    max_decode_rows: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Write the rows of `out` whose sequences have more than `max_decode_rows` rows."""
    total, heads, size = queries.shape
    sequences = len(metadata.seq_lens)
    tile = choose_prefill_tile(size, metadata.max_query_len, compute_capability(queries.device))
    # sequence i begins at tile query_starts[i] // rows + i: no tile is shared by two sequences,
    # and the host needs no query_starts
    tiles = total // tile.rows + sequences
    launch(_prefill_attention_kernel, (tiles, heads))(
        *attention_pointers(queries, layer_kv, metadata, out),
        scale,
        softcap or 1.0,
        metadata.page_tables.stride(0),
        sequences,
        max_decode_rows,
        **_prefill_constants(tile, heads, layer_kv, window, softcap),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _prefill_constants(
    tile: PrefillTile, heads: int, cache: LayerKV, window: int | None, softcap: float | None
) -> dict[str, object]:
    shared = attention_constants(heads, cache, window, softcap)
    return {**shared, "rows": tile.rows, "block_tokens": tile.block_tokens}


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "max_decode_rows"],
    do_not_specialize_on_alignment=UNALIGNED_ARGS,
)
def _prefill_attention_kernel(
    queries, keys, values, key_scales, value_scales, page_tables, query_starts, seq_lens, out,
    scale, softcap, table_stride, num_seqs, max_decode_rows,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    padded_head_dim: tl.constexpr, page_tokens: tl.constexpr, rows: tl.constexpr,
    block_tokens: tl.constexpr, window: tl.constexpr, quantized: tl.constexpr,
    has_softcap: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    # binary search: the last sequence that begins at or before this tile
    low, high = tile * 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // rows + middle <= tile:
            low = middle
        else:
            high = middle
    first = tl.load(query_starts + low)
    count = tl.load(query_starts + low + 1) - first
    length = tl.load(seq_lens + low)
    begin_row = (tile - (first // rows + low)) * rows
    if (count <= max_decode_rows) | (begin_row >= count):
        return
    row = begin_row + tl.arange(0, rows)
    element = tl.arange(0, padded_head_dim)
    mask = (row < count)[:, None] & (element < head_dim)[None, :]
    query_at = ((first + row).to(tl.int64) * num_heads + head) * head_dim
    q = tl.load(queries + query_at[:, None] + element[None, :], mask=mask, other=0.0)
    seen_to = length - count + row + 1
    seen_from = tl.zeros_like(seen_to)
    begin = 0
    if window > 0:
        seen_from = tl.maximum(seen_to - window, 0)
        begin = (
            tl.maximum(length - count + begin_row + 1 - window, 0) // block_tokens * block_tokens
        )
    end = tl.minimum(length - count + begin_row + rows, length)
    peak = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, padded_head_dim], tl.float32)
    table = page_tables + low.to(tl.int64) * table_stride
    for start in range(begin, end, block_tokens):
        peak, total, mixed = online_softmax_step(
            q, keys, values, key_scales, value_scales, table, head // (num_heads // num_kv_heads),
            start + tl.arange(0, block_tokens), end, seen_from, seen_to, peak, total, mixed, scale,
            softcap, num_kv_heads, head_dim, padded_head_dim, page_tokens, quantized, has_softcap,
        )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + query_at[:, None] + element[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=mask)


def variants() -> Iterator[Variant]:
    """Shapes of Llama 8B and 1B, Gemma 2 and Phi; 8-bit caches."""
    for heads, kv_heads, size, max_rows, kind, window, softcap in (
        (32, 8, 128, 2048, "bf16", None, None),
        (32, 8, 128, 64, "bf16", None, None),
        (64, 8, 128, 2048, "fp16", None, None),
        (32, 8, 64, 2048, "bf16", None, None),
        (16, 8, 256, 2048, "bf16", 4096, 50.0),
        (32, 32, 96, 2048, "bf16", 2047, None),
        (32, 8, 128, 2048, "i8", None, None),
        (32, 8, 128, 2048, "fp8e4nv", None, None),
    ):
        for arch in ARCHS:
            tile = choose_prefill_tile(size, max_rows, arch)
            compiled = _prefill_constants(
                tile, heads, meta_layer_kv(kv_heads, size, kind), window, softcap
            )
            yield Variant(
                name=f"prefill-{heads}-{kv_heads}-{size}-{kind}-{tile.rows}x{tile.block_tokens}",
                archs=frozenset({arch}),
                kernel=_prefill_attention_kernel,
                signature={
                    **attention_pointer_types(kind),
                    "scale": "fp32",
                    "softcap": "fp32",
                    **dict.fromkeys(("table_stride", "num_seqs", "max_decode_rows"), "i32"),
                    **dict.fromkeys(compiled, "constexpr"),
                },
                constants=compiled,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                min_arch=89 if kind == "fp8e4nv" else 80,
            )
