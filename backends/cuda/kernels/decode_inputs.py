"""The inputs of the next decode step, made on the device from those of the one before."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch

_BLOCK, _WARPS = 128, 4


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """Inputs of a step of one token per sequence, in row order; row and sequence are the same.

    tokens, slot_mapping: int64 [rows]. positions, seq_lens: int32 [rows]. page_tables: int32
    [rows, pages].
    """

    tokens: Tensor
    slot_mapping: Tensor
    positions: Tensor
    seq_lens: Tensor
    page_tables: Tensor


def advance_decode_inputs(
    inputs: DecodeInputs, sampled: Tensor, new_pages: Tensor | None, page_tokens: int
) -> None:
    """Move the first rows on by one token each, in place.

    sampled: int64 [at most rows], their tokens. new_pages: int32, of the same size: the page that a
    token begins, which is added to the table of its row, or -1 if none. None: no token begins a
    page. page_tokens: tokens of a page.
    """
    kernel = choose_kernel("decode_inputs", sampled)
    is_triton = kernel is Kernel.ADVANCE_DECODE_INPUTS
    (advance_decode_inputs_triton if is_triton else advance_decode_inputs_reference)(
        inputs, sampled, new_pages, page_tokens
    )


def advance_decode_inputs_reference(
    inputs: DecodeInputs, sampled: Tensor, new_pages: Tensor | None, page_tokens: int
) -> None:
    """PyTorch reference of `advance_decode_inputs`."""
    rows = len(sampled)
    positions, tables = inputs.positions[:rows], inputs.page_tables[:rows]
    inputs.tokens[:rows] = sampled
    inputs.seq_lens[:rows] += 1
    positions += 1
    at = (positions // page_tokens).long()[:, None]
    if new_pages is not None:
        known = tables.gather(1, at)[:, 0]
        tables.scatter_(1, at, torch.where(new_pages < 0, known, new_pages)[:, None])
    pages = tables.gather(1, at)[:, 0].long()
    inputs.slot_mapping[:rows] = pages * page_tokens + positions % page_tokens


def advance_decode_inputs_triton(
    inputs: DecodeInputs, sampled: Tensor, new_pages: Tensor | None, page_tokens: int
) -> None:
    """Triton implementation of `advance_decode_inputs`, one launch."""
    rows = len(sampled)
    launch(_advance_kernel, (ceil_div(rows, _BLOCK),))(
        inputs.tokens,
        inputs.slot_mapping,
        inputs.positions,
        inputs.seq_lens,
        inputs.page_tables,
        sampled,
        new_pages,
        inputs.page_tables.stride(0),
        rows,
        page_tokens=page_tokens,
        block=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit(do_not_specialize=["table_stride", "rows"])
def _advance_kernel(
    tokens,
    slot_mapping,
    positions,
    seq_lens,
    page_tables,
    sampled,
    new_pages,
    table_stride,
    rows,
    page_tokens: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    position = tl.load(positions + row, mask=inside, other=0) + 1
    length = tl.load(seq_lens + row, mask=inside, other=0) + 1
    entry = page_tables + row.to(tl.int64) * table_stride + position // page_tokens
    page = tl.load(entry, mask=inside, other=0)
    if new_pages is not None:
        new = tl.load(new_pages + row, mask=inside, other=-1)
        page = tl.where(new < 0, page, new)
        tl.store(entry, page, mask=inside & (new >= 0))
    slot = page.to(tl.int64) * page_tokens + position % page_tokens
    tl.store(slot_mapping + row, slot, mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(seq_lens + row, length, mask=inside)
    tl.store(tokens + row, tl.load(sampled + row, mask=inside, other=0), mask=inside)


def variants() -> Iterator[Variant]:
    """With and without new pages."""
    for has_pages in (False, True):
        pages = "*i32" if has_pages else "constexpr"
        yield Variant(
            name=f"advance_decode_inputs-{'pages' if has_pages else 'plain'}",
            kernel=_advance_kernel,
            signature={
                **dict.fromkeys(("tokens", "slot_mapping"), "*i64"),
                **dict.fromkeys(("positions", "seq_lens", "page_tables"), "*i32"),
                "sampled": "*i64",
                "new_pages": pages,
                **dict.fromkeys(("table_stride", "rows"), "i32"),
                **dict.fromkeys(("page_tokens", "block"), "constexpr"),
            },
            constants={"page_tokens": 16, "block": _BLOCK}
            | ({} if has_pages else {"new_pages": None}),
            num_warps=_WARPS,
        )
