"""Matrix products with 4-bit weights of int4_format: 65 to 256 rows, small groups from 17 on.

A program dequantizes its weights in registers, where tensor cores read them, so the dequantized
weight is never written to memory. Each of its blocks of rows dequantizes a weight again.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.device import ARCHS, compute_capability
from localgen.backends.cuda.kernels.gemm.int4_format import (
    TILE_INPUTS,
    float_type,
    parts_per_group,
    split_float_pairs,
)
from localgen.backends.cuda.kernels.gemm.tile import GemmTile, dot_dtype, store_transposed
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch


def choose_int4_wide_tile(outs: int, arch: int) -> GemmTile:
    """Return the tile of a program: as many rows as fit, because each block of them dequantizes.

    128 x 128 takes 118 KB of shared memory and 196 registers. Fewer outputs use smaller tiles, to
    have programs for every SM; so do GPUs with 99 KB.
    """
    if outs > 8192 and arch // 10 in (9, 10):
        return GemmTile(128, TILE_INPUTS, 128, 8, 3)
    # on sm_80 the compiler limits registers to 128 and spills; Triton 3.6 also on sm_120
    return GemmTile(64, TILE_INPUTS, 64, 4, 4, 255 if arch in (80, 120) else None)


def int4_wide_matmul_triton(
    x: Tensor, packed: Tensor, grid: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Triton implementation of `int4.int4_matmul` for more rows than `int4_gemm`, one launch."""
    rows, (outs, ins) = x.shape[0], (packed.shape[0], 2 * packed.shape[1])
    group = ins // grid.shape[1]
    tile = choose_int4_wide_tile(outs, compute_capability(x.device))
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    # programs that read the same weights are adjacent, so that they hit L2
    launch(_int4_wide_kernel, (ceil_div(rows, tile.rows), ceil_div(outs, tile.outputs)))(
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
        parts=parts_per_group(group),
        outputs=tile.outputs,
        padded_rows=tile.rows,
        stages=tile.num_stages,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    return out


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


@triton.jit(do_not_specialize=["rows"])
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
    float_type: tl.constexpr,
    grid_type: tl.constexpr,
    dot_dtype: tl.constexpr,
    parts: tl.constexpr,
    outputs: tl.constexpr,
    padded_rows: tl.constexpr,
    stages: tl.constexpr,
):
    """[outputs, 128] @ [128, padded rows] per iteration. parts: 32-input parts per group."""
    ins = tiles * 128
    row = tl.program_id(0) * padded_rows + tl.arange(0, padded_rows)
    own = tl.minimum(tl.program_id(1) * outputs + tl.arange(0, outputs), outs - 1).to(tl.int64)
    w_at = words + own[:, None] * (tiles * 16) + tl.arange(0, 16)[None, :]
    x_at = x + row.to(tl.int64)[None, :] * ins + tl.arange(0, 128)[:, None]
    g_at = grid + own * (ins // group_size)
    total = tl.zeros([outputs, padded_rows], tl.float32)
    for tile in tl.range(0, tiles, num_stages=stages):
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
    store_transposed(total, out, row, rows, to, outs)


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model by group size; one in float16."""
    for ins, outs, group, kind in (
        (4096, 4096, 128, "*bf16"),
        (4096, 28672, 128, "*bf16"),
        (4096, 28672, 64, "*bf16"),
        (896, 9728, 32, "*bf16"),
        (14336, 4096, 32, "*fp16"),
    ):
        tiles = {arch: choose_int4_wide_tile(outs, arch) for arch in ARCHS}
        for tile in dict.fromkeys(tiles.values()):
            archs = frozenset(arch for arch in ARCHS if tiles[arch] == tile)
            yield _int4_wide_variant(tile, f"{ins}-{outs}", group, kind, archs)


def _int4_wide_variant(
    tile: GemmTile, name: str, group_size: int, input_type: str, archs: frozenset[int]
) -> Variant:
    of = tl.float16 if input_type == "*fp16" else tl.bfloat16
    constants: dict[str, Any] = {
        "float_type": of,
        "grid_type": tl.float16,
        "dot_dtype": of,
        "parts": parts_per_group(group_size),
        "outputs": tile.outputs,
        "padded_rows": tile.rows,
        "stages": tile.num_stages,
    }
    pointers = {"x": input_type, "words": "*i32", "grid": "*i32"}
    numbers = dict.fromkeys(("rows", "tiles", "outs", "group_size"), "i32")
    return Variant(
        name=f"int4-wide-{name}-{group_size}-{input_type}",
        kernel=_int4_wide_kernel,
        signature=pointers
        | {"bias": input_type, "out": input_type}
        | numbers
        | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        num_warps=tile.num_warps,
        max_registers=tile.max_registers,
        archs=archs,
    )
