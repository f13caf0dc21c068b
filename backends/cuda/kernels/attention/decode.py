"""Decode attention, few query rows over a long cache: split-KV flash decoding (Dao et al. 2023)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
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
from localgen.backends.cuda.kernels.device import ARCHS, compute_capability, count_sms
from localgen.backends.cuda.kernels.kv_cache import QUANTIZED_MAX, LayerKV
from localgen.backends.cuda.kernels.launch import Variant, launch, next_power_of_2

# a token and the drafts after it; sequences with more rows are prefills
MAX_DECODE_ROWS = 8
# minimum tokens per split, unless the sliding window is shorter
_MIN_SPLIT_TOKENS = 128
_MAX_SPLITS = 64
# programs per SM: two, so that one loads while the other computes
_PROGRAMS_PER_SM = 2
_HOPPER_ARCH = 90
# per thread: two programs of four warps per SM can have this many
_MAX_REGISTERS = 255
# the smallest dimension tl.dot accepts
_MIN_DOT_SIZE = 16


@dataclass(frozen=True, slots=True)
class SplitKVPlan:
    """Launch parameters of the decode kernel.

    max_rows: query rows of a sequence, at most. padded_rows: max_rows times the query heads per KV
    head, padded for tl.dot. block_tokens: tokens per loop iteration. max_registers: limit per
    thread, or None for the compiler's choice.
    """

    max_rows: int
    padded_rows: int
    block_tokens: int
    num_splits: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def plan_split_kv(
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
) -> SplitKVPlan:
    """Choose how to split the KV cache among programs.

    quantized: the cache is 8-bit. arch, num_sms: compute capability and SM count of the GPU.
    """
    rows = 1 if max_query_len == 1 else MAX_DECODE_ROWS
    padded = max(_MIN_DOT_SIZE, next_power_of_2(rows * num_heads // num_kv_heads))
    wanted = -(-_PROGRAMS_PER_SM * num_sms // max(1, num_seqs * num_kv_heads))
    useful = -(-max_seq_len // _MIN_SPLIT_TOKENS)
    splits = next_power_of_2(max(1, min(wanted, useful, _MAX_SPLITS)))
    # 16 KiB of keys and of values per block: two of each fit in shared memory on every GPU
    block = 8192 // next_power_of_2(head_dim)
    if padded >= 64:  # otherwise the rows do not fit in registers
        block //= 2
    # with 64 KiB of accumulators, four warps have no registers left for the queries
    warps = 8 if padded * next_power_of_2(head_dim) >= 16384 else 4
    registers = None
    if _may_spill(padded * block, splits, head_dim, quantized, arch):
        registers = _MAX_REGISTERS
    return SplitKVPlan(rows, padded, block, splits, warps, num_stages=2, max_registers=registers)


def _may_spill(num_scores: int, num_splits: int, head_dim: int, quantized: bool, arch: int) -> bool:
    """True if the compiler may spill registers to raise occupancy.

    Raising the limit to all registers prevents it, and two programs of four warps still fit on an
    SM. num_scores: attention scores per block of a program. The conditions come from compiling all
    choices of `plan_split_kv`, widened a little because spilling differs between Triton versions.
    """
    if num_splits == 1 and num_scores >= (2048 if quantized else 4096):
        return True
    return arch < _HOPPER_ARCH and (quantized or head_dim > 128)


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
    _, heads, size = queries.shape
    sequences, kv_heads = len(metadata.seq_lens), layer_kv.keys.shape[1]
    chosen = plan_split_kv(
        num_seqs=sequences,
        max_query_len=metadata.max_query_len,
        max_seq_len=min(metadata.max_seq_len, (window or metadata.max_seq_len) + MAX_DECODE_ROWS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        quantized=layer_kv.keys.dtype in QUANTIZED_MAX,
        arch=compute_capability(queries.device),
        num_sms=count_sms(queries.device),
    )
    partial, peaks = out, out
    if chosen.num_splits > 1:
        shape = (sequences, chosen.max_rows, heads, chosen.num_splits)
        partial = torch.empty(*shape, size, dtype=torch.float32, device=out.device)
        peaks = torch.empty(shape, dtype=torch.float32, device=out.device)
    launch(_decode_attention_kernel, (sequences, kv_heads, chosen.num_splits))(
        *attention_pointers(queries, layer_kv, metadata, out),
        partial,
        peaks,
        scale,
        softcap or 1.0,
        metadata.page_tables.stride(0),
        **_decode_constants(chosen, heads, layer_kv, window, softcap),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        maxnreg=chosen.max_registers,
    )
    if chosen.num_splits > 1:
        launch(_combine_splits_kernel, (sequences * chosen.max_rows, heads))(
            partial,
            peaks,
            metadata.query_starts,
            out,
            num_heads=heads,
            head_dim=size,
            padded_head_dim=next_power_of_2(size),
            max_rows=chosen.max_rows,
            num_splits=chosen.num_splits,
            num_warps=_combine_warps(chosen.num_splits, size),
        )


def _combine_warps(num_splits: int, head_dim: int) -> int:
    """Return the number of warps, so that a thread holds at most 64 values (up to 8 warps)."""
    numbers: int = num_splits * next_power_of_2(head_dim)
    return max(1, min(8, numbers // 2048))


def _decode_constants(
    plan: SplitKVPlan, heads: int, cache: LayerKV, window: int | None, softcap: float | None
) -> dict[str, object]:
    return {
        **attention_constants(heads, cache, window, softcap),
        "max_rows": plan.max_rows,
        "padded_rows": plan.padded_rows,
        "block_tokens": plan.block_tokens,
        "num_splits": plan.num_splits,
    }


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=UNALIGNED_ARGS)
def _decode_attention_kernel(
    queries, keys, values, key_scales, value_scales, page_tables, query_starts, seq_lens, out,
    split_out, split_lse, scale, softcap, table_stride,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    padded_head_dim: tl.constexpr, page_tokens: tl.constexpr, max_rows: tl.constexpr,
    padded_rows: tl.constexpr, block_tokens: tl.constexpr, num_splits: tl.constexpr,
    window: tl.constexpr, quantized: tl.constexpr, has_softcap: tl.constexpr,
):  # fmt: skip
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    length = tl.load(seq_lens + sequence)
    if (count == 0) | (count > max_rows):
        return
    group: tl.constexpr = num_heads // num_kv_heads
    # rows of the dot: for each token, the queries of all heads that share this KV head
    at = tl.arange(0, padded_rows)
    row, member = at // group, at % group
    element = tl.arange(0, padded_head_dim)
    live = row < count
    query_at = ((first + row).to(tl.int64) * num_heads + head * group + member) * head_dim
    mask = live[:, None] & (element < head_dim)[None, :]
    q = tl.load(queries + query_at[:, None] + element[None, :], mask=mask, other=0.0)
    seen_to = length - count + row + 1
    seen_from = tl.zeros_like(seen_to)
    begin = 0
    if window > 0:
        seen_from = tl.maximum(seen_to - window, 0)
        begin = tl.maximum(length - count + 1 - window, 0) // block_tokens * block_tokens
    # split the actual length, not max_seq_len, so that all splits have work
    share = tl.cdiv(tl.cdiv(length - begin, num_splits), block_tokens) * block_tokens
    begin += split * share
    end = tl.minimum(begin + share, length)
    peak = tl.full([padded_rows], float("-inf"), tl.float32)
    total = tl.zeros([padded_rows], tl.float32)
    mixed = tl.zeros([padded_rows, padded_head_dim], tl.float32)
    table = page_tables + sequence.to(tl.int64) * table_stride
    for start in range(begin, end, block_tokens):
        peak, total, mixed = online_softmax_step(
            q, keys, values, key_scales, value_scales, table, head,
            start + tl.arange(0, block_tokens), end, seen_from, seen_to, peak, total, mixed,
            scale, softcap,
            num_kv_heads, head_dim, padded_head_dim, page_tokens, quantized, has_softcap,
        )  # fmt: skip
    # rows that saw no token in this split keep peak -inf, which gives them weight 0 below
    total = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / total[:, None]
    if num_splits == 1:
        to = out + query_at[:, None] + element[None, :]
        tl.store(to, mixed.to(out.dtype.element_ty), mask=mask)
    else:
        own = (
            (sequence * max_rows + row).to(tl.int64) * num_heads + head * group + member
        ) * num_splits
        tl.store(split_out + (own + split)[:, None] * head_dim + element[None, :], mixed, mask=mask)
        tl.store(split_lse + own + split, peak + tl.log2(total), mask=live)


@triton.jit(do_not_specialize_on_alignment=["query_starts"])
def _combine_splits_kernel(
    split_out, split_lse, query_starts, out,
    num_heads: tl.constexpr, head_dim: tl.constexpr, padded_head_dim: tl.constexpr,
    max_rows: tl.constexpr, num_splits: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a row, weighted by 2 ** log-sum-exp; an empty split has weight 0."""
    place, head = tl.program_id(0), tl.program_id(1)
    sequence, row = place // max_rows, place % max_rows
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    if (row >= count) | (count > max_rows):
        return
    split = tl.arange(0, num_splits)
    element = tl.arange(0, padded_head_dim)
    own = (place.to(tl.int64) * num_heads + head) * num_splits + split
    logs = tl.load(split_lse + own)
    weights = tl.exp2(logs - tl.max(logs, 0))
    mask = (split < num_splits)[:, None] & (element < head_dim)[None, :]
    parts = tl.load(split_out + own[:, None] * head_dim + element[None, :], mask=mask, other=0.0)
    mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    to = out + ((first + row).to(tl.int64) * num_heads + head) * head_dim + element
    tl.store(to, mixed.to(out.dtype.element_ty), mask=element < head_dim)


def variants() -> Iterator[Variant]:
    """Variants of the decode and the combine kernel."""
    yield from _decode_variants()
    yield from _combine_variants()


def _decode_variants() -> Iterator[Variant]:
    """Shapes of Llama 8B, 70B and 1B, Qwen3 235B, Gemma 2 and Phi; drafts; 8-bit caches.

    They include the configurations that spill first on each target.
    """
    for heads, kv_heads, size, max_rows, sequences, kind, window, softcap in (
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
            chosen = plan_split_kv(
                num_seqs=sequences,
                max_query_len=max_rows,
                max_seq_len=window or 8192,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=size,
                quantized=cache.keys.dtype in QUANTIZED_MAX,
                arch=arch,
                num_sms=132,
            )
            compiled = _decode_constants(chosen, heads, cache, window, softcap)
            types = attention_pointer_types(kind)
            partial = "*fp32" if chosen.num_splits > 1 else types["out"]
            yield Variant(
                name=f"decode-{heads}-{kv_heads}-{size}-{kind}-{chosen.max_rows}-{chosen.num_splits}",
                archs=frozenset({arch}),
                kernel=_decode_attention_kernel,
                signature={
                    **types,
                    **dict.fromkeys(("split_out", "split_lse"), partial),
                    "scale": "fp32",
                    "softcap": "fp32",
                    "table_stride": "i32",
                    **dict.fromkeys(compiled, "constexpr"),
                },
                constants=compiled,
                num_warps=chosen.num_warps,
                num_stages=chosen.num_stages,
                max_registers=chosen.max_registers,
                min_arch=89 if kind == "fp8e4nv" else 80,
            )


def _combine_variants() -> Iterator[Variant]:
    for size, splits in ((128, 32), (256, 64)):
        compiled = {
            "num_heads": 32,
            "head_dim": size,
            "padded_head_dim": next_power_of_2(size),
            "max_rows": 1,
            "num_splits": splits,
        }
        yield Variant(
            name=f"combine-{size}-{splits}",
            kernel=_combine_splits_kernel,
            signature={
                "split_out": "*fp32",
                "split_lse": "*fp32",
                "query_starts": "*i32",
                "out": "*bf16",
                **dict.fromkeys(compiled, "constexpr"),
            },
            constants=compiled,
            num_warps=_combine_warps(splits, size),
        )
