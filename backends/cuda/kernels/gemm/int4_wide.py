"""Matrix products of 17 to 256 rows with 4-bit weights of int4_format.

A program dequantizes its weights in registers, where tensor cores read them, so the dequantized
weight is never written to memory. Each block of rows dequantizes a weight again. If there are few
outputs, programs divide the inputs (split-K), and a second launch adds up their sums.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.device import ARCHS, compute_capability, count_sms
from localgen.backends.cuda.kernels.gemm.int4_format import (
    TILE_INPUTS,
    float_type,
    has_small_groups,
    parts_per_group,
    split_float_pairs,
)
from localgen.backends.cuda.kernels.gemm.tile import GemmTile, dot_dtype, store_transposed
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch

_MAX_SPLITS = 8
# tiles of inputs that a program has at least
_MIN_SPLIT_TILES = 4
# outputs per program that adds up the sums
_SUMMED = 1024


class WideTile(NamedTuple):
    """The tile of a program, and among how many programs its inputs are divided."""

    tile: GemmTile
    splits: int


def choose_int4_wide_tile(
    rows: int, outs: int, ins: int, group_size: int, arch: int, num_sms: int
) -> WideTile:
    """Return the tile of a program, and among how many programs its inputs are divided.

    As many rows as fit, because each block of rows dequantizes again: 128 x 256 takes 216 KB of
    shared memory, so one program fits on an SM; of smaller tiles two, and one dequantizes while the
    other computes. Measured on an H100.
    """
    if arch // 10 in (9, 10):
        largest = 128 if has_small_groups(group_size) else 256
        padded = next(size for size in (32, 64, 128, 256) if rows <= size or size == largest)
        tile = GemmTile(128, TILE_INPUTS, padded, 8 if padded == 256 else 4, 3)
    else:
        # without the limit the compiler takes 128 registers and spills
        tile = GemmTile(64, TILE_INPUTS, 64, 4, 4, 255)
    programs = ceil_div(rows, tile.rows) * ceil_div(outs, tile.outputs)
    at_once = num_sms if tile.rows == 256 else 2 * num_sms
    useful = min(_MAX_SPLITS, ins // TILE_INPUTS // _MIN_SPLIT_TILES)
    return WideTile(tile, max(1, min(useful, at_once // programs)))


def int4_wide_matmul_triton(
    x: Tensor,
    packed: Tensor,
    grid: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Triton implementation of `int4.int4_matmul` for more rows than `int4_gemm`.

    One launch, or two if inputs are divided among programs, which write float32 sums: the second
    adds them in a fixed order.
    """
    rows, (outs, ins) = x.shape[0], (packed.shape[0], 2 * packed.shape[1])
    group = ins // grid.shape[1]
    arch, num_sms = compute_capability(x.device), count_sms(x.device)
    tile, splits = choose_int4_wide_tile(rows, outs, ins, group, arch, num_sms)
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    sums = out
    if splits > 1:
        sums = torch.empty((splits, rows, outs), dtype=torch.float32, device=x.device)
    # programs that read the same weights are adjacent, so that they hit L2
    launch(_int4_wide_kernel, (ceil_div(rows, tile.rows), ceil_div(outs, tile.outputs), splits))(
        x.contiguous(),
        packed.view(torch.int32),
        grid.view(torch.int32),
        bias if splits == 1 else None,
        sums,
        rows,
        ins // TILE_INPUTS,
        outs,
        group,
        splits,
        float_type=float_type(x.dtype),
        grid_type=float_type(grid.dtype),
        dot_dtype=dot_dtype(x),
        parts=parts_per_group(group),
        outputs=tile.outputs,
        padded_rows=tile.rows,
        stages=tile.num_stages,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    if splits > 1:
        launch(_sum_splits_kernel, (ceil_div(rows * outs, _SUMMED),))(
            *(sums, bias, None if residual is None else residual.contiguous(), out),
            *(rows * outs, outs, splits),
            block=_SUMMED,
        )
        return out
    return out if residual is None else out + residual


@triton.jit
def _dequantized_part(
    words, part: tl.constexpr, both, float_type: tl.constexpr, grid_type: tl.constexpr
):
    """Weights of 32 inputs, float32 [outputs, 32], from words [outputs, 16] and the grid's."""
    exponent: tl.constexpr = 0x4300 if float_type == tl.bfloat16 else 0x6400
    surplus: tl.constexpr = 128.0 if float_type == tl.bfloat16 else 1024.0
    scale, zero = split_float_pairs(both, grid_type)
    scale = scale.to(tl.float32)
    offset = -(zero.to(tl.float32) + surplus) * scale
    digits = ((words >> (4 * part)) & 0x000F000F) | (exponent << 16 | exponent)
    low, high = split_float_pairs(digits, float_type)
    pairs = tl.reshape(tl.join(low, high), [words.shape[0], 32]).to(tl.float32)
    # one instruction; the offset costs 7 of float32's bits (float16: 10), those left are enough
    return tl.fma(
        pairs,
        tl.broadcast_to(scale[:, None], pairs.shape),
        tl.broadcast_to(offset[:, None], pairs.shape),
    )


@triton.jit(do_not_specialize=["rows", "splits"])
def _int4_wide_kernel(
    x,
    words,
    grid,
    bias,
    out,
    rows,
    tiles,
    outs,
    group_size,
    splits,
    float_type: tl.constexpr,
    grid_type: tl.constexpr,
    dot_dtype: tl.constexpr,
    parts: tl.constexpr,
    outputs: tl.constexpr,
    padded_rows: tl.constexpr,
    stages: tl.constexpr,
):
    """[outputs, 128] @ [128, padded rows] per iteration. parts: 32-input parts per group."""
    split = tl.program_id(2)
    share = tl.cdiv(tiles, splits)
    first = split * share
    ins = tiles * 128
    row = tl.program_id(0) * padded_rows + tl.arange(0, padded_rows)
    own = tl.minimum(tl.program_id(1) * outputs + tl.arange(0, outputs), outs - 1).to(tl.int64)
    w_at = words + own[:, None] * (tiles * 16) + tl.arange(0, 16)[None, :]
    x_at = x + row.to(tl.int64)[None, :] * ins + tl.arange(0, 128)[:, None]
    g_at = grid + own * (ins // group_size)
    total = tl.zeros([outputs, padded_rows], tl.float32)
    for tile in tl.range(first, tl.minimum(first + share, tiles), num_stages=stages):
        w = tl.load(w_at + tile * 16)
        a = tl.load(x_at + tile * 128, mask=(row < rows)[None, :], other=0.0)
        g0 = tl.load(g_at + tile * 128 // group_size)
        g1 = g0 if parts >= 2 else tl.load(g_at + (tile * 128 + 32) // group_size)
        g2 = g0 if parts == 4 else tl.load(g_at + (tile * 128 + 64) // group_size)
        g3 = g2 if parts >= 2 else tl.load(g_at + (tile * 128 + 96) // group_size)
        even = tl.join(
            _dequantized_part(w, 0, g0, float_type, grid_type).to(dot_dtype),
            _dequantized_part(w, 2, g2, float_type, grid_type).to(dot_dtype),
        )
        odd = tl.join(
            _dequantized_part(w, 1, g1, float_type, grid_type).to(dot_dtype),
            _dequantized_part(w, 3, g3, float_type, grid_type).to(dot_dtype),
        )
        # [outputs, input of a part, part // 2, part % 2] -> [outputs, input]
        weight = tl.reshape(tl.permute(tl.join(even, odd), [0, 2, 3, 1]), [outputs, 128])
        total = tl.dot(weight, a.to(dot_dtype), total, input_precision="ieee")
    to = tl.program_id(1) * outputs + tl.arange(0, outputs)
    if bias is not None:
        total += tl.load(bias + to, mask=to < outs, other=0.0).to(tl.float32)[:, None]
    out += split.to(tl.int64) * rows * outs
    store_transposed(total, out, row, rows, to, outs)


@triton.jit(do_not_specialize=["size", "splits"])
def _sum_splits_kernel(sums, bias, residual, out, size, outs, splits, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    total = tl.load(sums + at, mask=inside, other=0.0)
    for split in range(1, splits):
        total += tl.load(sums + split * size + at, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % outs, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model by rows and group size; one in float16."""
    for rows, ins, outs, group, kind in (
        (32, 4096, 4096, 128, "*bf16"),
        (64, 4096, 28672, 128, "*bf16"),
        (128, 4096, 28672, 64, "*bf16"),
        (256, 4096, 28672, 128, "*bf16"),
        (256, 896, 9728, 32, "*bf16"),
        (64, 14336, 4096, 32, "*fp16"),
        (256, 14336, 4096, 64, "*fp16"),
    ):
        tiles = {arch: choose_int4_wide_tile(rows, outs, ins, group, arch, 132) for arch in ARCHS}
        for tile in dict.fromkeys(tiles.values()):
            archs = frozenset(arch for arch in ARCHS if tiles[arch] == tile)
            yield _int4_wide_variant(tile, f"{rows}-{ins}-{outs}", group, kind, archs)
    for kind in ("*bf16", "*fp16"):
        constants = {"block": _SUMMED}
        yield Variant(
            name=f"int4-sum-splits-{kind}",
            kernel=_sum_splits_kernel,
            signature={
                "sums": "*fp32",
                **dict.fromkeys(("bias", "residual", "out"), kind),
                **dict.fromkeys(("size", "outs", "splits"), "i32"),
                **dict.fromkeys(constants, "constexpr"),
            },
            constants=constants,
        )


def _int4_wide_variant(
    wide: WideTile, name: str, group_size: int, input_type: str, archs: frozenset[int]
) -> Variant:
    of = tl.float16 if input_type == "*fp16" else tl.bfloat16
    tile, is_split = wide.tile, wide.splits > 1
    constants: dict[str, Any] = {
        "float_type": of,
        "grid_type": tl.float16,
        "dot_dtype": of,
        "parts": parts_per_group(group_size),
        "outputs": tile.outputs,
        "padded_rows": tile.rows,
        "stages": tile.num_stages,
    }
    if is_split:
        constants["bias"] = None
    types = {
        **dict.fromkeys(("x", "bias"), input_type),
        **dict.fromkeys(("words", "grid"), "*i32"),
        "out": "*fp32" if is_split else input_type,
        **dict.fromkeys(("rows", "tiles", "outs", "group_size", "splits"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return Variant(
        name=f"int4-wide-{name}-{group_size}-{input_type}",
        kernel=_int4_wide_kernel,
        signature={name: types[name] for name in _int4_wide_kernel.arg_names if name in types},
        constants=constants,
        num_warps=tile.num_warps,
        max_registers=tile.max_registers,
        archs=archs,
    )
