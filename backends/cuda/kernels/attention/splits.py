"""Attention whose tokens are divided among programs: partial results and their combination."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.dependent_launch import wait_for_previous_kernel
from localgen.backends.cuda.kernels.launch import Launcher, Variant, next_power_of_2

MAX_SPLITS = 64


def num_splits_for(*wanted: int, useful: int) -> int:
    """Return the number of splits, a power of two: the largest that is wanted, if useful."""
    splits: int = next_power_of_2(max(1, min(max(wanted), useful, MAX_SPLITS)))
    return splits


def empty_partials(num_rows: int, out: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Allocate the partial results of a kernel for num_rows rows; placeholders without splits.

    Returns the outputs, float32 [rows, heads, splits, head size], and their log-sum-exp in log2
    units, float32 [rows, heads, splits]. A split without tokens writes only the latter, -inf.
    """
    if num_splits == 1:
        return out, out
    _, heads, size = out.shape
    shape = (num_rows, heads, num_splits)
    return (
        torch.empty(*shape, size, dtype=torch.float32, device=out.device),
        torch.empty(shape, dtype=torch.float32, device=out.device),
    )


def combine_splits(
    partials: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    out: Tensor,
    *,
    max_decode_rows: int,
    rows_per_seq: int | None,
) -> None:
    """Write the rows of `out` from the partials of the decode or the prefill kernel.

    rows_per_seq: of the decode kernel, whose partial rows of sequence i begin at i * rows_per_seq.
    None: those of the prefill kernel, with the partial rows numbered as the rows of `out`. Each
    kernel has the sequences of at most, or more than, max_decode_rows rows.
    """
    split_out, split_lse = partials
    rows, heads, splits, size = split_out.shape
    _launcher(heads, size, rows_per_seq or 0, splits)(
        (rows, heads),
        split_out,
        split_lse,
        metadata.query_starts,
        out,
        len(metadata.seq_lens),
        max_decode_rows,
    )


@cache
def _launcher(heads: int, size: int, rows_per_seq: int, splits: int) -> Launcher:
    return Launcher(
        _combine_splits_kernel,
        **_constants(heads, size, rows_per_seq, splits),
        num_warps=_num_warps(splits, size),
    )


def _num_warps(num_splits: int, head_dim: int) -> int:
    """Return the number of warps, so that a thread holds at most 64 values (up to 8 warps)."""
    numbers: int = num_splits * next_power_of_2(head_dim)
    return max(1, min(8, numbers // 2048))


def _constants(heads: int, size: int, rows_per_seq: int, splits: int) -> dict[str, object]:
    return {
        "num_heads": heads,
        "head_dim": size,
        "padded_head_dim": next_power_of_2(size),
        "rows_per_seq": rows_per_seq,
        "num_splits": splits,
    }


@triton.jit
def find_sequence(query_starts, num_seqs, place, unit, extra):
    """Return the last sequence that begins at or before a place, by binary search.

    Sequence i begins at place query_starts[i] // unit + i * extra.
    """
    low, high = place * 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // unit + middle * extra <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["num_seqs", "max_decode_rows"],
    do_not_specialize_on_alignment=["query_starts"],
)
def _combine_splits_kernel(
    split_out, split_lse, query_starts, out, num_seqs, max_decode_rows,
    num_heads: tl.constexpr, head_dim: tl.constexpr, padded_head_dim: tl.constexpr,
    rows_per_seq: tl.constexpr, num_splits: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    """Combine the splits of a row, weighted by 2 ** log-sum-exp; those without tokens weigh 0."""
    wait_for_previous_kernel(pdl)
    place, head = tl.program_id(0), tl.program_id(1)
    if rows_per_seq > 0:
        sequence = place // rows_per_seq
        first = tl.load(query_starts + sequence)
        row = first + place % rows_per_seq
    else:
        sequence = find_sequence(query_starts, num_seqs, place, 1, 0)
        first = tl.load(query_starts + sequence)
        row = place
    end = tl.load(query_starts + sequence + 1)
    is_decoding = end - first <= max_decode_rows
    if (row >= end) | (is_decoding != (rows_per_seq > 0)):
        return
    split = tl.arange(0, num_splits)
    element = tl.arange(0, padded_head_dim)
    own = (place.to(tl.int64) * num_heads + head) * num_splits + split
    logs = tl.load(split_lse + own)
    weights = tl.exp2(logs - tl.max(logs, 0))
    mask = (logs > float("-inf"))[:, None] & (element < head_dim)[None, :]
    parts = tl.load(split_out + own[:, None] * head_dim + element[None, :], mask=mask, other=0.0)
    mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    to = out + (row.to(tl.int64) * num_heads + head) * head_dim + element
    tl.store(to, mixed.to(out.dtype.element_ty), mask=element < head_dim)


def variants() -> Iterator[Variant]:
    """Few and many splits, of decoding sequences and of prompts."""
    for size, splits, rows_per_seq in ((128, 32, 1), (256, 64, 1), (128, 16, 0)):
        compiled = _constants(32, size, rows_per_seq, splits)
        yield Variant(
            name=f"combine-{size}-{splits}" + ("" if rows_per_seq else "-prompt"),
            kernel=_combine_splits_kernel,
            signature={
                "split_out": "*fp32",
                "split_lse": "*fp32",
                "query_starts": "*i32",
                "out": "*bf16",
                **dict.fromkeys(("num_seqs", "max_decode_rows"), "i32"),
                **dict.fromkeys(compiled, "constexpr"),
            },
            constants=compiled,
            num_warps=_num_warps(splits, size),
        )
