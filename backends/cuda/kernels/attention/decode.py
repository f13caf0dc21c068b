"""Attention of a few rows over a long cache: flash decoding with split KV (Dao et al. 2023)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.attention.online_softmax import (
    UNALIGNED,
    attend,
    constants,
    example,
    pointer_types,
    pointers,
)
from localgen.backends.cuda.kernels.attention_metadata import Ragged
from localgen.backends.cuda.kernels.device import ARCHS, arch_of, units_of
from localgen.backends.cuda.kernels.kv_cache import LARGEST, LayerKV
from localgen.backends.cuda.kernels.launch import Variant, launch

# sequences with more rows than that are prompts: a token, and the drafts after it
MAX_ROWS = 8
# a split reads at least so many tokens, unless the window is shorter
_LEAST_SPLIT = 128
_MOST_SPLITS = 64
# programs for each multiprocessor: two, so that one loads while another computes
_PROGRAMS = 2
_HOPPER = 90
# of a thread: two programs of four warps can have that many
_MOST_REGISTERS = 255
# tl.dot has no smaller side
_LEAST_SIDE = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """rows: of a sequence, at most. padded: rows times the heads that share a kv head, as tl.dot
    wants them. block: tokens at a time. registers: most of a thread; None: as the compiler has it.
    """

    rows: int
    padded: int
    block: int
    splits: int
    warps: int
    stages: int
    registers: int | None = None


def plan(
    *,
    sequences: int,
    max_rows: int,
    max_len: int,
    heads: int,
    kv_heads: int,
    size: int,
    quantized: bool,
    arch: int,
    units: int,
) -> Plan:
    """How to cut the work. quantized: the cache, in eight bits. arch: compute capability of the
    GPU. units: its multiprocessors."""
    rows = 1 if max_rows == 1 else MAX_ROWS
    padded = max(_LEAST_SIDE, triton.next_power_of_2(rows * heads // kv_heads))
    wanted = -(-_PROGRAMS * units // max(1, sequences * kv_heads))
    useful = -(-max_len // _LEAST_SPLIT)
    splits = triton.next_power_of_2(max(1, min(wanted, useful, _MOST_SPLITS)))
    # 16 KiB of keys and as much of values at a time: two of each fit everywhere
    block = 8192 // triton.next_power_of_2(size)
    if padded >= 64:  # or registers would not hold the rows
        block //= 2
    # beside 64 KiB of sums, four warps would not hold the queries
    warps = 8 if padded * triton.next_power_of_2(size) >= 16384 else 4
    registers = None
    if _may_spill(padded * block, splits, size, quantized, arch):
        registers = _MOST_REGISTERS
    return Plan(rows, padded, block, splits, warps, stages=2, registers=registers)


def _may_spill(scores: int, splits: int, size: int, quantized: bool, arch: int) -> bool:
    """Whether the compiler, left alone, may spill a few bytes so that more programs fit on a
    multiprocessor. Given all registers it does not; with four warps, two programs still fit.

    scores: of a program at a time. Found by compiling what `plan` can choose, and a little wider
    than what spilled, for that differs between versions of Triton.
    """
    if splits == 1 and scores >= (2048 if quantized else 4096):
        return True
    return arch < _HOPPER and (quantized or size > 128)


def decode_triton(
    queries: Tensor,
    cache: LayerKV,
    ragged: Ragged,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Fill the rows of `out` that belong to sequences of at most MAX_ROWS rows."""
    _, heads, size = queries.shape
    sequences, kv_heads = len(ragged.lengths), cache.keys.shape[1]
    chosen = plan(
        sequences=sequences,
        max_rows=ragged.max_rows,
        max_len=min(ragged.max_len, (window or ragged.max_len) + MAX_ROWS),
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        quantized=cache.keys.dtype in LARGEST,
        arch=arch_of(queries.device),
        units=units_of(queries.device),
    )
    partial, peaks = out, out
    if chosen.splits > 1:
        shape = (sequences, chosen.rows, heads, chosen.splits)
        partial = torch.empty(*shape, size, dtype=torch.float32, device=out.device)
        peaks = torch.empty(shape, dtype=torch.float32, device=out.device)
    launch(_decode, (sequences, kv_heads, chosen.splits))(
        *pointers(queries, cache, ragged, out),
        partial,
        peaks,
        scale,
        softcap or 1.0,
        ragged.tables.stride(0),
        **_constants(chosen, heads, cache, window, softcap),
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        maxnreg=chosen.registers,
    )
    if chosen.splits > 1:
        launch(_combine, (sequences * chosen.rows, heads))(
            partial,
            peaks,
            ragged.starts,
            out,
            heads=heads,
            size=size,
            block_size=triton.next_power_of_2(size),
            rows=chosen.rows,
            splits=chosen.splits,
            num_warps=_combine_warps(chosen.splits, size),
        )


def _combine_warps(splits: int, size: int) -> int:
    """So that a thread holds at most 64 numbers."""
    numbers: int = splits * triton.next_power_of_2(size)
    return max(1, min(8, numbers // 2048))


def _constants(
    chosen: Plan, heads: int, cache: LayerKV, window: int | None, softcap: float | None
) -> dict[str, object]:
    return {
        **constants(heads, cache, window, softcap),
        "rows": chosen.rows,
        "padded": chosen.padded,
        "block": chosen.block,
        "splits": chosen.splits,
    }


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=UNALIGNED)
def _decode(
    queries, keys, values, key_scales, value_scales, tables, starts, lengths, out, partial, peaks,
    scale, softcap, table_stride,
    heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, block_size: tl.constexpr,
    page: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr, block: tl.constexpr,
    splits: tl.constexpr, window: tl.constexpr, quantized: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    length = tl.load(lengths + sequence)
    if (count == 0) | (count > rows):
        return
    group: tl.constexpr = heads // kv_heads
    # rows of the dot are the queries of a token for all heads of the group, token after token
    at = tl.arange(0, padded)
    row, member = at // group, at % group
    element = tl.arange(0, block_size)
    live = row < count
    query_at = ((first + row).to(tl.int64) * heads + head * group + member) * size
    mask = live[:, None] & (element < size)[None, :]
    q = tl.load(queries + query_at[:, None] + element[None, :], mask=mask, other=0.0)
    seen_to = length - count + row + 1
    seen_from = tl.zeros_like(seen_to)
    begin = 0
    if window > 0:
        seen_from = tl.maximum(seen_to - window, 0)
        begin = tl.maximum(length - count + 1 - window, 0) // block * block
    # cut by what there is, not by what there may be: all splits have work
    share = tl.cdiv(tl.cdiv(length - begin, splits), block) * block
    begin += split * share
    end = tl.minimum(begin + share, length)
    peak = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    mixed = tl.zeros([padded, block_size], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    for start in range(begin, end, block):
        peak, total, mixed = attend(
            q, keys, values, key_scales, value_scales, table, head, start + tl.arange(0, block),
            end, seen_from, seen_to, peak, total, mixed, scale, softcap,
            kv_heads, size, block_size, page, quantized, capped,
        )  # fmt: skip
    # a row of this split that saw nothing: its peak of -inf says so
    total = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / total[:, None]
    if splits == 1:
        to = out + query_at[:, None] + element[None, :]
        tl.store(to, mixed.to(out.dtype.element_ty), mask=mask)
    else:
        own = ((sequence * rows + row).to(tl.int64) * heads + head * group + member) * splits
        tl.store(partial + (own + split)[:, None] * size + element[None, :], mixed, mask=mask)
        tl.store(peaks + own + split, peak + tl.log2(total), mask=live)


@triton.jit(do_not_specialize_on_alignment=["starts"])
def _combine(
    partial, peaks, starts, out,
    heads: tl.constexpr, size: tl.constexpr, block_size: tl.constexpr, rows: tl.constexpr,
    splits: tl.constexpr,
):  # fmt: skip
    """Splits weighted by their sums. A split that saw nothing has the weight 2 ** -inf."""
    place, head = tl.program_id(0), tl.program_id(1)
    sequence, row = place // rows, place % rows
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    if (row >= count) | (count > rows):
        return
    split = tl.arange(0, splits)
    element = tl.arange(0, block_size)
    own = (place.to(tl.int64) * heads + head) * splits + split
    logs = tl.load(peaks + own)
    weights = tl.exp2(logs - tl.max(logs, 0))
    mask = (split < splits)[:, None] & (element < size)[None, :]
    parts = tl.load(partial + own[:, None] * size + element[None, :], mask=mask, other=0.0)
    mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    to = out + ((first + row).to(tl.int64) * heads + head) * size + element
    tl.store(to, mixed.to(out.dtype.element_ty), mask=element < size)


def variants() -> Iterator[Variant]:
    """Both kernels."""
    yield from _decode_variants()
    yield from _combine_variants()


def _decode_variants() -> Iterator[Variant]:
    """Heads of Llama 8B, 70B and 1B, Qwen3 235B, Gemma 2 and Phi; drafts; a cache in eight bits.
    Among them is what spills first on each target."""
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
            cache = example(kv_heads, size, kind)
            chosen = plan(
                sequences=sequences,
                max_rows=max_rows,
                max_len=window or 8192,
                heads=heads,
                kv_heads=kv_heads,
                size=size,
                quantized=cache.keys.dtype in LARGEST,
                arch=arch,
                units=132,
            )
            compiled = _constants(chosen, heads, cache, window, softcap)
            types = pointer_types(kind)
            partial = "*fp32" if chosen.splits > 1 else types["out"]
            yield Variant(
                name=f"decode-{heads}-{kv_heads}-{size}-{kind}-{chosen.rows}-{chosen.splits}",
                archs=frozenset({arch}),
                kernel=_decode,
                signature={
                    **types,
                    **dict.fromkeys(("partial", "peaks"), partial),
                    "scale": "fp32",
                    "softcap": "fp32",
                    "table_stride": "i32",
                    **dict.fromkeys(compiled, "constexpr"),
                },
                constants=compiled,
                num_warps=chosen.warps,
                num_stages=chosen.stages,
                registers=chosen.registers,
                min_arch=89 if kind == "fp8e4nv" else 80,
            )


def _combine_variants() -> Iterator[Variant]:
    for size, splits in ((128, 32), (256, 64)):
        compiled = {
            "heads": 32,
            "size": size,
            "block_size": triton.next_power_of_2(size),
            "rows": 1,
            "splits": splits,
        }
        yield Variant(
            name=f"combine-{size}-{splits}",
            kernel=_combine,
            signature={
                "partial": "*fp32",
                "peaks": "*fp32",
                "starts": "*i32",
                "out": "*bf16",
                **dict.fromkeys(compiled, "constexpr"),
            },
            constants=compiled,
            num_warps=_combine_warps(splits, size),
        )
