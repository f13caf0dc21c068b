"""Attention of prompts: tiles of query rows over the cached pages, ragged (FlashAttention 2, Dao
2023)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from localgen.backends.cuda.kernels.device import ARCHS, arch_of
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.launch import Variant, launch


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and tokens at a time."""

    rows: int
    block: int
    warps: int
    stages: int


# the tensor cores of this one keep their sums out of the way of everything else
_HOPPER = 90


def tile_of(size: int, max_rows: int, arch: int) -> Tile:
    """As large as registers and 99 KiB of shared memory allow. arch: compute capability."""
    if size > 128:
        return Tile(64, 32, 8, 2)
    if max_rows <= 64:
        return Tile(64, 32, 4, 2)
    return Tile(128, 64 if arch == _HOPPER else 32, 8, 2)


def prompt_triton(
    queries: Tensor,
    cache: LayerKV,
    ragged: Ragged,
    out: Tensor,
    *,
    above: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Fill the rows of `out` that belong to sequences of more than `above` rows."""
    total, heads, size = queries.shape
    sequences = len(ragged.lengths)
    tile = tile_of(size, ragged.max_rows, arch_of(queries.device))
    # a sequence begins at tile starts // rows + its number: so no two share one, and only the
    # device has to know where sequences begin
    tiles = total // tile.rows + sequences
    launch(_prompt, (tiles, heads))(
        *pointers(queries, cache, ragged, out),
        scale,
        softcap or 1.0,
        ragged.tables.stride(0),
        sequences,
        above,
        **_constants(tile, heads, cache, window, softcap),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _constants(
    tile: Tile, heads: int, cache: LayerKV, window: int | None, softcap: float | None
) -> dict[str, object]:
    shared = constants(heads, cache, window, softcap)
    return {**shared, "rows": tile.rows, "block": tile.block}


@triton.jit(
    do_not_specialize=["table_stride", "sequences", "above"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def _prompt(
    queries, keys, values, key_scales, value_scales, tables, starts, lengths, out,
    scale, softcap, table_stride, sequences, above,
    heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, block_size: tl.constexpr,
    page: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, window: tl.constexpr,
    quantized: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    # the last sequence that begins at this tile or before
    low, high = tile * 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // rows + middle <= tile:
            low = middle
        else:
            high = middle
    first = tl.load(starts + low)
    count = tl.load(starts + low + 1) - first
    length = tl.load(lengths + low)
    begin_row = (tile - (first // rows + low)) * rows
    if (count <= above) | (begin_row >= count):
        return
    row = begin_row + tl.arange(0, rows)
    element = tl.arange(0, block_size)
    mask = (row < count)[:, None] & (element < size)[None, :]
    query_at = ((first + row).to(tl.int64) * heads + head) * size
    q = tl.load(queries + query_at[:, None] + element[None, :], mask=mask, other=0.0)
    seen_to = length - count + row + 1
    seen_from = tl.zeros_like(seen_to)
    begin = 0
    if window > 0:
        seen_from = tl.maximum(seen_to - window, 0)
        begin = tl.maximum(length - count + begin_row + 1 - window, 0) // block * block
    end = tl.minimum(length - count + begin_row + rows, length)
    peak = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, block_size], tl.float32)
    table = tables + low.to(tl.int64) * table_stride
    for start in range(begin, end, block):
        peak, total, mixed = attend(
            q, keys, values, key_scales, value_scales, table, head // (heads // kv_heads),
            start + tl.arange(0, block), end, seen_from, seen_to, peak, total, mixed, scale,
            softcap, kv_heads, size, block_size, page, quantized, capped,
        )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + query_at[:, None] + element[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=mask)


def variants() -> Iterator[Variant]:
    """Heads of Llama 8B and 1B, Gemma 2 and Phi; a cache in eight bits."""
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
            tile = tile_of(size, max_rows, arch)
            compiled = _constants(tile, heads, example(kv_heads, size, kind), window, softcap)
            yield Variant(
                name=f"prompt-{heads}-{kv_heads}-{size}-{kind}-{tile.rows}x{tile.block}",
                archs=frozenset({arch}),
                kernel=_prompt,
                signature={
                    **pointer_types(kind),
                    "scale": "fp32",
                    "softcap": "fp32",
                    **dict.fromkeys(("table_stride", "sequences", "above"), "i32"),
                    **dict.fromkeys(compiled, "constexpr"),
                },
                constants=compiled,
                num_warps=tile.warps,
                num_stages=tile.stages,
                min_arch=89 if kind == "fp8e4nv" else 80,
            )
