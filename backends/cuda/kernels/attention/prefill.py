"""Prefill attention: tiles of query rows over cached pages (FlashAttention-2, Dao 2023)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.attention.online_softmax import (
    MAX_REGISTERS,
    SMALL_SHARED_ARCHS,
    UNALIGNED_ARGS,
    AttentionTile,
    attend_tile,
    attention_constants,
    attention_pointer_types,
    attention_pointers,
    meta_layer_kv,
)
from localgen.backends.cuda.kernels.attention.splits import (
    combine_splits,
    empty_partials,
    find_sequence,
    num_splits_for,
)
from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.device import ARCHS, compute_capability, count_sms
from localgen.backends.cuda.kernels.kv_cache import QUANTIZED_MAX, LayerKV
from localgen.backends.cuda.kernels.launch import Variant, launch, next_power_of_2

# minimum tokens per split: each split of a tile writes its sums in float32
_MIN_SPLIT_TOKENS = 1024
_HOPPER_ARCH = 90


def choose_prefill_tile(
    *,
    num_seqs: int,
    num_rows: int,
    max_query_len: int,
    max_seq_len: int,
    max_decode_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    quantized: bool,
    arch: int,
    num_sms: int,
) -> AttentionTile:
    """Choose the largest tile that registers and 99 KiB of shared memory allow, and the splits.

    num_rows: of all sequences. quantized: the cache is 8-bit. arch, num_sms: compute capability and
    SM count of the GPU.
    """
    group = num_heads // num_kv_heads
    # wgmma (Hopper) leaves enough registers for larger blocks
    rows, block, warps = 128, 64 if arch == _HOPPER_ARCH else 32, 8
    if head_dim > 128:
        rows, block = 64, 16 if arch in SMALL_SHARED_ARCHS else 32
    elif max_query_len * group <= 64:
        rows, block, warps = 64, 32, 4
    if quantized and head_dim <= 128:  # conversions need registers, too
        block //= 2
    rows = max(rows, next_power_of_2(group))
    # at most: each sequence has a row, and a prompt at least max_decode_rows more
    prompts = max(1, min(num_seqs, (num_rows - num_seqs) // max(1, max_decode_rows)))
    tiles = (num_rows - num_seqs) // (rows // group) + prompts
    splits = num_splits_for(
        num_sms // (tiles * num_kv_heads), useful=max_seq_len // _MIN_SPLIT_TOKENS
    )
    # otherwise the compiler spills to raise occupancy
    registers = MAX_REGISTERS if arch < _HOPPER_ARCH else None
    return AttentionTile(rows, block, splits, warps, num_stages=3, max_registers=registers)


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
    sequences, kv_heads = len(metadata.seq_lens), layer_kv.keys.shape[1]
    longest = min(metadata.max_query_len, total)
    tile = choose_prefill_tile(
        num_seqs=sequences,
        num_rows=total,
        max_query_len=longest,
        max_seq_len=min(metadata.max_seq_len, (window or metadata.max_seq_len) + longest),
        max_decode_rows=max_decode_rows,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        quantized=layer_kv.keys.dtype in QUANTIZED_MAX,
        arch=compute_capability(queries.device),
        num_sms=count_sms(queries.device),
    )
    tiles = total // (tile.rows * kv_heads // heads) + sequences
    partials = empty_partials(total, out, tile.num_splits)
    launch(_prefill_attention_kernel, (kv_heads, tiles, tile.num_splits))(
        *attention_pointers(queries, layer_kv, metadata, out),
        *partials,
        scale,
        softcap or 1.0,
        metadata.page_tables.stride(0),
        tile.num_splits,
        sequences,
        max_decode_rows,
        **attention_constants(
            *(heads, layer_kv.keys.shape, layer_kv.keys.dtype, window, softcap is not None, tile)
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
    )
    if tile.num_splits > 1:
        combine_splits(partials, metadata, out, max_decode_rows=max_decode_rows, rows_per_seq=None)


@triton.jit(
    do_not_specialize=["table_stride", "num_splits", "num_seqs", "max_decode_rows"],
    do_not_specialize_on_alignment=UNALIGNED_ARGS,
)
def _prefill_attention_kernel(
    queries, keys, values, key_scales, value_scales, page_tables, query_starts, seq_lens, out,
    split_out, split_lse, scale, softcap, table_stride, num_splits, num_seqs, max_decode_rows,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    padded_head_dim: tl.constexpr, page_tokens: tl.constexpr, tile_rows: tl.constexpr,
    block_tokens: tl.constexpr, window: tl.constexpr, quantized: tl.constexpr,
    has_softcap: tl.constexpr, is_split: tl.constexpr,
):  # fmt: skip
    # the last tiles of a prompt see most tokens: they begin first
    head, tile, split = (
        tl.program_id(0),
        tl.num_programs(1) - 1 - tl.program_id(1),
        tl.program_id(2),
    )
    # no tile is shared by two sequences, and the host needs no query_starts
    tile_tokens: tl.constexpr = tile_rows * num_kv_heads // num_heads
    sequence = find_sequence(query_starts, num_seqs, tile, tile_tokens, 1)
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    begin_row = (tile - (first // tile_tokens + sequence)) * tile_tokens
    if (count <= max_decode_rows) | (begin_row >= count):
        return
    attend_tile(
        queries, keys, values, key_scales, value_scales,
        page_tables + sequence.to(tl.int64) * table_stride, out, split_out, split_lse,
        scale, softcap, first, count, tl.load(seq_lens + sequence), begin_row, head,
        split, num_splits, first,
        num_heads, num_kv_heads, head_dim, padded_head_dim, page_tokens, tile_rows, block_tokens,
        window, quantized, has_softcap, is_split,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Shapes of Llama 8B and 1B, Gemma 2 and Phi; 8-bit caches."""
    for heads, kv_heads, size, max_rows, kind, window, softcap in (
        (32, 8, 128, 2048, "bf16", None, None),
        (32, 8, 128, 16, "bf16", None, None),
        (64, 8, 128, 2048, "fp16", None, None),
        (32, 8, 64, 2048, "bf16", None, None),
        (16, 8, 256, 2048, "bf16", 4096, 50.0),
        (32, 32, 96, 2048, "bf16", 2047, None),
        (32, 8, 128, 2048, "i8", None, None),
        (32, 8, 128, 2048, "fp8e4nv", None, None),
    ):
        for arch in ARCHS:
            cache = meta_layer_kv(kv_heads, size, kind)
            tile = choose_prefill_tile(
                num_seqs=1,
                num_rows=max_rows,
                max_query_len=max_rows,
                max_seq_len=8192,
                max_decode_rows=8,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=size,
                quantized=cache.keys.dtype in QUANTIZED_MAX,
                arch=arch,
                num_sms=132,
            )
            compiled = attention_constants(
                *(heads, cache.keys.shape, cache.keys.dtype, window, softcap is not None, tile)
            )
            types = attention_pointer_types(kind)
            partial = "*fp32" if tile.num_splits > 1 else types["out"]
            yield Variant(
                name=f"prefill-{heads}-{kv_heads}-{size}-{kind}-{tile.rows}",
                archs=frozenset({arch}),
                kernel=_prefill_attention_kernel,
                signature={
                    **types,
                    **dict.fromkeys(("split_out", "split_lse"), partial),
                    **dict.fromkeys(("scale", "softcap"), "fp32"),
                    **dict.fromkeys(
                        ("table_stride", "num_splits", "num_seqs", "max_decode_rows"), "i32"
                    ),
                    **dict.fromkeys(compiled, "constexpr"),
                },
                constants=compiled,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                max_registers=tile.max_registers,
                min_arch=89 if kind == "fp8e4nv" else 80,
            )
