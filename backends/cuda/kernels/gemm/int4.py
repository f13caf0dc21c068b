"""Matrix products with 4-bit weights of int4_format, up to about 64 rows: memory-bound.

The exponent that turns codes into floats is an offset, subtracted at the end of a group, using a
product with ones; scales multiply sums of integers, in float32. More rows: see int4_wide.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from localgen.backends.cuda.kernels.device import ARCHS, compute_capability
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.gemm.dense import linear
from localgen.backends.cuda.kernels.gemm.int4_format import (
    PART_INPUTS,
    TILE_INPUTS,
    dequantize_int4,
    dequantize_int4_triton,
    float_type,
    is_tiled,
    parts_per_group,
    split_float_pairs,
)
from localgen.backends.cuda.kernels.gemm.int4_wide import int4_wide_matmul_triton
from localgen.backends.cuda.kernels.gemm.tile import GemmTile, dot_dtype, store_transposed
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch


def int4_matmul(x: Tensor, packed: Tensor, grid: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, [rows, outs] in x's dtype, accumulated in float32.

    x: [rows, ins], inputs in the order of the packed weight. packed: uint8 [outs, ins / 2] from
    `pack_int4`. grid: [outs, groups, 2] from `pack_grid`. bias: [outs].
    """
    ins = 2 * packed.shape[1]
    fits = is_tiled(ins) and ins // grid.shape[1] % PART_INPUTS == 0 and packed.is_contiguous()
    match choose_kernel("int4", x, fits=fits):
        case Kernel.INT4_GEMM:
            return int4_matmul_triton(x, packed, grid, bias)
        case Kernel.INT4_WIDE:
            return int4_wide_matmul_triton(x, packed, grid, bias)
        case Kernel.INT4_DEQUANTIZE:
            return functional.linear(x, dequantize_int4_triton(packed, grid, x.dtype), bias)
    return int4_matmul_reference(x, packed, grid, bias)


def int4_matmul_reference(
    x: Tensor, packed: Tensor, grid: Tensor, bias: Tensor | None = None
) -> Tensor:
    """PyTorch reference of `int4_matmul`; the dequantized weight is rounded to x's dtype."""
    return linear(x, dequantize_int4(packed, grid, x.dtype), bias)


def choose_int4_tile(rows: int, outs: int, group_size: int, arch: int) -> GemmTile:
    """Return the tile of a program; each warp processes TILE_INPUTS inputs at once.

    Above 32 rows, programs share weights through L2. stages - 2 or stages - 1 tiles of 8 KB of
    codes are in flight: at 4096 outputs, 256 programs, 31 to 46 KB per SM of an H200; at 28672
    outputs, 896 programs, 4 per SM, twice that. Including the rows this takes 72 KB or (32 rows)
    80 KB of shared memory; the smallest supported GPU has 99 KB.
    """
    if rows <= 8:
        return (
            GemmTile(16, TILE_INPUTS, 8, 8, 4)
            if outs <= 8192
            else GemmTile(32, TILE_INPUTS, 8, 4, 4)
        )
    if rows <= 16:
        return GemmTile(32, TILE_INPUTS, 16, 4, 4)
    # on sm_100, Triton 3.6 limits registers to fit a third program and spills, although shared
    # memory has no room for a third program
    spills = arch // 10 == 10 and group_size % TILE_INPUTS == 0
    return GemmTile(32, TILE_INPUTS, 32, 4, 3, 255 if spills else None)


def int4_matmul_triton(
    x: Tensor, packed: Tensor, grid: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Triton implementation of `int4_matmul` for up to about 64 rows, one launch."""
    rows, (outs, ins) = x.shape[0], (packed.shape[0], 2 * packed.shape[1])
    group = ins // grid.shape[1]
    tile = choose_int4_tile(rows, outs, group, compute_capability(x.device))
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    launch(_int4_gemm_kernel, (ceil_div(rows, tile.rows), ceil_div(outs, tile.outputs)))(
        x.contiguous(),
        packed.view(torch.int32),
        grid.view(torch.int32),
        bias,
        out,
        rows,
        ins // TILE_INPUTS,
        outs,
        group,
        float_type=float_type(x.dtype),
        grid_type=float_type(grid.dtype),
        dot_dtype=dot_dtype(x),
        dots_per_group=parts_per_group(group),
        outputs=tile.outputs,
        padded_rows=tile.rows,
        warps=tile.num_warps,
        stages=tile.num_stages,
        even=ins % (TILE_INPUTS * tile.num_warps) == 0,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    return out


@triton.jit
def _interleave(low, high):
    """[.., words] twice -> [.., 2 * words], alternating."""
    return tl.reshape(tl.join(low, high), [low.shape[0], low.shape[1], 2 * low.shape[2]])


@triton.jit(do_not_specialize=["rows"])
def _int4_gemm_kernel(
    x,
    words,
    grid,
    bias,
    out,
    rows,
    tiles,
    outs,
    group_size,
    float_type: tl.constexpr,
    grid_type: tl.constexpr,
    dot_dtype: tl.constexpr,
    dots_per_group: tl.constexpr,
    outputs: tl.constexpr,
    padded_rows: tl.constexpr,
    warps: tl.constexpr,
    stages: tl.constexpr,
    even: tl.constexpr,
):
    """Warp w computes tiles w, w + warps, ...: [warps, outputs, 32] @ [warps, 32, padded rows]."""
    exponent: tl.constexpr = 0x4300 if float_type == tl.bfloat16 else 0x6400
    one: tl.constexpr = 0x3F80 if float_type == tl.bfloat16 else 0x3C00
    surplus: tl.constexpr = 128.0 if float_type == tl.bfloat16 else 1024.0
    ins = tiles * 128
    groups = ins // group_size
    block = tl.program_id(1)
    row = tl.program_id(0) * padded_rows + tl.arange(0, padded_rows)
    own = tl.minimum(block * outputs + tl.arange(0, outputs), outs - 1)
    warp = tl.arange(0, warps)
    w_at = (
        words
        + own.to(tl.int64)[None, :, None] * (tiles * 16)
        + (warp[:, None, None] * 16 + tl.arange(0, 16)[None, None, :])
    )
    x_at = (
        x
        + row.to(tl.int64)[None, None, :] * ins
        + (warp[:, None, None] * 128 + tl.arange(0, 32)[None, :, None])
    )
    g_at = grid + own.to(tl.int64)[None, :] * groups
    given = (row < rows)[None, None, :]
    # zeros derived from loaded words: a constant would get a different register layout
    none = (tl.load(words + tl.arange(0, 16)) & 0xFFFF) >> 16
    some = tl.broadcast_to((none | (one << 16 | one))[None, None, :], [warps, outputs, 16])
    low, high = split_float_pairs(some, float_type)
    ones = _interleave(low, high).to(dot_dtype)
    total = tl.zeros([warps, outputs, padded_rows], tl.float32)
    for tile in tl.range(0, tiles, warps, num_stages=stages):
        mine = tile + warp
        here = given
        if even:
            w = tl.load(w_at + tile * 16, eviction_policy="evict_first")
        else:
            there = (mine < tiles)[:, None, None]
            w = tl.load(w_at + tile * 16, mask=there, other=0, eviction_policy="evict_first")
            here = given & there
            mine = tl.minimum(mine, tiles - 1)
        for part in tl.static_range(0, 4, dots_per_group):
            both = tl.load(g_at + ((mine * 128 + part * 32) // group_size)[:, None])[:, :, None]
            scale, zero = split_float_pairs(both, grid_type)
            summed = tl.zeros([warps, outputs, padded_rows], tl.float32)
            inputs = tl.zeros([warps, outputs, padded_rows], tl.float32)
            for i in tl.static_range(dots_per_group):
                a = tl.load(x_at + tile * 128 + (part + i) * 32, mask=here, other=0.0).to(dot_dtype)
                digits = ((w >> (4 * (part + i))) & 0x000F000F) | (exponent << 16 | exponent)
                low, high = split_float_pairs(digits, float_type)
                summed = tl.dot(
                    _interleave(low, high).to(dot_dtype), a, summed, input_precision="ieee"
                )
                inputs = tl.dot(ones, a, inputs, input_precision="ieee")
            total += scale.to(tl.float32) * (summed - (zero.to(tl.float32) + surplus) * inputs)
    result = tl.sum(total, 0)
    to = block * outputs + tl.arange(0, outputs)
    if bias is not None:
        result += tl.load(bias + to, mask=to < outs, other=0.0).to(tl.float32)[:, None]
    store_transposed(result, out, row, rows, to, outs)


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model by rows and group size; some with a remainder, one in float16."""
    for rows, ins, outs, group, kind in (
        (1, 4096, 4096, 128, "*bf16"),
        (1, 4096, 28672, 128, "*bf16"),
        (1, 4096, 6144, 64, "*bf16"),
        (8, 896, 9728, 32, "*bf16"),
        (8, 14336, 4096, 128, "*fp16"),
        (16, 4096, 4096, 128, "*bf16"),
        (64, 4096, 4096, 128, "*bf16"),
        (64, 896, 4864, 32, "*bf16"),
    ):
        tiles = {arch: choose_int4_tile(rows, outs, group, arch) for arch in ARCHS}
        for tile in dict.fromkeys(tiles.values()):
            archs = frozenset(arch for arch in ARCHS if tiles[arch] == tile)
            yield _int4_gemm_variant(tile, rows, ins, outs, group, kind, archs)


def _int4_gemm_variant(
    tile: GemmTile,
    rows: int,
    ins: int,
    outs: int,
    group_size: int,
    input_type: str,
    archs: frozenset[int],
) -> Variant:
    """Return the variant that int4_matmul_triton launches. input_type: Triton pointer type of x."""
    of = tl.float16 if input_type == "*fp16" else tl.bfloat16
    constants: dict[str, Any] = {
        "float_type": of,
        "grid_type": tl.float16,
        "dot_dtype": of,
        "dots_per_group": parts_per_group(group_size),
        "outputs": tile.outputs,
        "padded_rows": tile.rows,
        "warps": tile.num_warps,
        "stages": tile.num_stages,
        "even": ins % (TILE_INPUTS * tile.num_warps) == 0,
    }
    pointers = {"x": input_type, "words": "*i32", "grid": "*i32"}
    numbers = dict.fromkeys(("rows", "tiles", "outs", "group_size"), "i32")
    return Variant(
        name=f"int4-{rows}-{ins}-{outs}-{group_size}-{input_type}",
        kernel=_int4_gemm_kernel,
        signature=pointers
        | {"bias": input_type, "out": input_type}
        | numbers
        | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        num_warps=tile.num_warps,
        max_registers=tile.max_registers,
        archs=archs,
    )
