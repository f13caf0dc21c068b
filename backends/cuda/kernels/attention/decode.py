"""Decode attention, few query rows over a long cache: split-KV flash decoding (Dao et al. 2023)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
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
    num_splits_for,
)
from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.dependent_launch import wait_for_previous_kernel
from localgen.backends.cuda.kernels.device import ARCHS, compute_capability, count_sms
from localgen.backends.cuda.kernels.dispatch import Kernel, max_rows
from localgen.backends.cuda.kernels.kv_cache import QUANTIZED_MAX, LayerKV
from localgen.backends.cuda.kernels.launch import Launcher, Variant, next_power_of_2

# a token and the drafts after it; sequences with more rows are prefills
MAX_DECODE_ROWS = max_rows(Kernel.DECODE_ATTENTION)
# minimum tokens per split, unless the sliding window is shorter
_MIN_SPLIT_TOKENS = 32
# a longer sequence is split, however many others there are: the step would wait for it
_MAX_SPLIT_TOKENS = 4096
# partial results of these splits: about this, at most
_MAX_PARTIAL_BYTES = 32 << 20
# programs per SM: two, so that one loads while the other computes
_PROGRAMS_PER_SM = 2
_HOPPER_ARCH = 90
# the smallest dimension tl.dot accepts
_MIN_DOT_SIZE = 16


def rows_per_seq(max_query_len: int) -> int:
    """Return the query rows of a sequence that the kernel is compiled for."""
    return 1 if max_query_len == 1 else MAX_DECODE_ROWS


def choose_decode_tile(
    *,
    num_seqs: int,
    max_query_len: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    quantized: bool,
    arch: int,
    num_sms: int,
) -> AttentionTile:
    """Choose the tile, and how to split the KV cache among programs.

    quantized: the cache is 8-bit. arch, num_sms: compute capability and SM count of the GPU.
    """
    rows = rows_per_seq(max_query_len)
    padded = max(_MIN_DOT_SIZE, next_power_of_2(rows * num_heads // num_kv_heads))
    partial_bytes = 4 * max(1, num_seqs) * rows * num_heads * head_dim
    splits = num_splits_for(
        -(-_PROGRAMS_PER_SM * num_sms // max(1, num_seqs * num_kv_heads)),
        min(-(-max_seq_len // _MAX_SPLIT_TOKENS), _MAX_PARTIAL_BYTES // partial_bytes),
        useful=-(-max_seq_len // _MIN_SPLIT_TOKENS),
    )
    # 8 KiB of keys and of values per block, and two blocks of each: the fastest on an H100, where
    # an 8-bit cache, whose values are converted, is faster with two warps than with four
    block = (8192 if quantized else 4096) // next_power_of_2(head_dim)
    # otherwise two programs do not fit on an SM, or the rows do not fit in registers
    if quantized and (arch in SMALL_SHARED_ARCHS or padded >= 64):
        block //= 2
    # with 64 KiB of accumulators, four warps have no registers left for the queries
    warps = 8 if padded * next_power_of_2(head_dim) >= 16384 else 4
    if quantized and padded == _MIN_DOT_SIZE:
        warps = 2
    registers = MAX_REGISTERS if _may_spill(padded * block, splits, quantized, arch) else None
    return AttentionTile(padded, block, splits, warps, num_stages=3, max_registers=registers)


def _may_spill(num_scores: int, num_splits: int, quantized: bool, arch: int) -> bool:
    """True if the compiler may spill registers to raise occupancy.

    Raising the limit to all registers prevents it, and two programs of four warps still fit on an
    SM. num_scores: attention scores per block of a program. The conditions come from compiling all
    choices of `choose_decode_tile`, widened a little because spilling differs between Triton
    versions.
    """
    if num_splits == 1 and num_scores >= (2048 if quantized else 4096):
        return True
    return arch < _HOPPER_ARCH or arch in SMALL_SHARED_ARCHS


def decode_attention_triton(
    queries: Tensor,
    layer_kv: LayerKV,
    metadata: AttentionMetadata,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Write the rows of `out` whose sequences have at most MAX_DECODE_ROWS rows."""
    heads = queries.shape[1]
    sequences, kv_heads = len(metadata.seq_lens), layer_kv.keys.shape[1]
    rows = rows_per_seq(metadata.max_query_len)
    launcher, num_splits = _launcher(
        *(sequences, metadata.max_query_len, metadata.max_seq_len, heads),
        *(layer_kv.keys.shape, layer_kv.keys.dtype, window, softcap is not None),
        *(compute_capability(queries.device), count_sms(queries.device)),
    )
    partials = empty_partials(sequences * rows, out, num_splits)
    launcher(
        (sequences, kv_heads, num_splits),
        *attention_pointers(queries, layer_kv, metadata, out),
        *partials,
        scale,
        softcap or 1.0,
        metadata.page_tables.stride(0),
        num_splits,
    )
    if num_splits > 1:
        combine_splits(partials, metadata, out, max_decode_rows=MAX_DECODE_ROWS, rows_per_seq=rows)


# for the layers of a step, which have a few kinds: lengths differ between steps
@lru_cache(64)
def _launcher(
    num_seqs: int,
    max_query_len: int,
    max_seq_len: int,
    num_heads: int,
    cache_shape: torch.Size,
    cache_dtype: torch.dtype,
    window: int | None,
    has_softcap: bool,
    arch: int,
    num_sms: int,
) -> tuple[Launcher, int]:
    """The launcher and the number of splits."""
    tile = choose_decode_tile(
        num_seqs=num_seqs,
        max_query_len=max_query_len,
        max_seq_len=min(max_seq_len, (window or max_seq_len) + MAX_DECODE_ROWS),
        num_heads=num_heads,
        num_kv_heads=cache_shape[1],
        head_dim=cache_shape[3],
        quantized=cache_dtype in QUANTIZED_MAX,
        arch=arch,
        num_sms=num_sms,
    )
    launcher = Launcher(
        _decode_attention_kernel,
        max_rows=rows_per_seq(max_query_len),
        **attention_constants(num_heads, cache_shape, cache_dtype, window, has_softcap, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
    )
    return launcher, tile.num_splits


@triton.jit(
    do_not_specialize=["table_stride", "num_splits"],
    do_not_specialize_on_alignment=UNALIGNED_ARGS,
)
def _decode_attention_kernel(
    queries, keys, values, key_scales, value_scales, page_tables, query_starts, seq_lens, out,
    split_out, split_lse, scale, softcap, table_stride, num_splits,
    max_rows: tl.constexpr, num_heads: tl.constexpr, num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr, padded_head_dim: tl.constexpr, page_tokens: tl.constexpr,
    tile_rows: tl.constexpr, block_tokens: tl.constexpr, window: tl.constexpr,
    quantized: tl.constexpr, has_softcap: tl.constexpr, is_split: tl.constexpr,
    pdl: tl.constexpr = False,
):  # fmt: skip
    wait_for_previous_kernel(pdl)
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    if (count == 0) | (count > max_rows):
        return
    attend_tile(
        queries, keys, values, key_scales, value_scales,
        page_tables + sequence.to(tl.int64) * table_stride, out, split_out, split_lse,
        scale, softcap, first, count, tl.load(seq_lens + sequence), 0, head,
        split, num_splits, sequence * max_rows,
        num_heads, num_kv_heads, head_dim, padded_head_dim, page_tokens, tile_rows, block_tokens,
        window, quantized, has_softcap, is_split,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Shapes of Llama 8B, 70B and 1B, Qwen3 235B, Gemma 2 and Phi; drafts; 8-bit caches.

    They include the configurations that spill first on each target.
    """
    for heads, kv_heads, size, rows, sequences, kind, window, softcap in (
        (32, 8, 128, 1, 1, "bf16", None, None),
        (32, 8, 128, 1, 256, "bf16", None, None),
        (32, 8, 128, 8, 1, "bf16", None, None),
        (32, 8, 128, 1, 1, "i8", None, None),
        (32, 8, 128, 1, 256, "fp8e4nv", None, None),
        (64, 8, 128, 8, 64, "fp8e4nv", None, None),
        (64, 4, 128, 8, 64, "fp16", None, None),
        (32, 8, 64, 1, 256, "i8", None, None),
        (16, 8, 256, 1, 1, "bf16", 4096, 50.0),
        (16, 8, 256, 1, 256, "bf16", None, 50.0),
        (32, 32, 96, 1, 4, "bf16", 2047, None),
    ):
        for arch in ARCHS:
            cache = meta_layer_kv(kv_heads, size, kind)
            tile = choose_decode_tile(
                num_seqs=sequences,
                max_query_len=rows,
                max_seq_len=window or (8192 if sequences == 1 else 4096),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=size,
                quantized=cache.keys.dtype in QUANTIZED_MAX,
                arch=arch,
                num_sms=132,
            )
            compiled = {
                "max_rows": rows_per_seq(rows),
                **attention_constants(
                    *(heads, cache.keys.shape, cache.keys.dtype, window, softcap is not None, tile)
                ),
            }
            types = attention_pointer_types(kind)
            partial = "*fp32" if tile.num_splits > 1 else types["out"]
            yield Variant(
                name=f"decode-{heads}-{kv_heads}-{size}-{kind}-{rows}-{tile.num_splits}",
                archs=frozenset({arch}),
                kernel=_decode_attention_kernel,
                signature={
                    **types,
                    **dict.fromkeys(("split_out", "split_lse"), partial),
                    **dict.fromkeys(("scale", "softcap"), "fp32"),
                    **dict.fromkeys(("table_stride", "num_splits"), "i32"),
                    **dict.fromkeys(compiled, "constexpr"),
                },
                constants=compiled,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                max_registers=tile.max_registers,
                min_arch=89 if kind == "fp8e4nv" else 80,
            )
