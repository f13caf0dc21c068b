"""Matrix product of 2 to 16 rows with 4-bit weights of int4_format, on tensor cores.

The exponent that turns codes into floats is an offset, subtracted at the end of a group, using a
product with ones; scales multiply sums of integers, in float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.dependent_launch import wait_for_previous_kernel
from localgen.backends.cuda.kernels.gemm.int4_format import (
    TILE_INPUTS,
    float_type,
    has_small_groups,
    parts_per_group,
    split_float_pairs,
)
from localgen.backends.cuda.kernels.gemm.tile import (
    ActivationKind,
    GemmTile,
    dot_dtype,
    gemm_epilogue,
    weight_row_ids,
)
from localgen.backends.cuda.kernels.launch import Launcher, Variant, ceil_div

MAX_REGISTERS = 255


def choose_int4_tile(rows: int, outs: int, group_size: int) -> GemmTile:
    """Return the tile of a program; each warp processes TILE_INPUTS inputs at once.

    The fastest of those tried on an H100. With up to 16 rows it takes at most 80 KB of shared
    memory; the smallest supported GPU has 99 KB.
    """
    if rows <= 8:
        return GemmTile(32, TILE_INPUTS, 8, 4, 4)
    # at the limit, the registers of two programs fit: the compiler spills some to fit a third, for
    # which shared memory has no room
    if outs <= 8192 or has_small_groups(group_size):
        return GemmTile(32, TILE_INPUTS, 16, 4, 4, MAX_REGISTERS)
    return GemmTile(64, TILE_INPUTS, 16, 2, 3, MAX_REGISTERS)


def int4_matmul_triton(
    x: Tensor,
    packed: Tensor,
    grid: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: ActivationKind | None = None,
) -> Tensor:
    """Triton implementation of `int4_matmul`, or of `int4_gated_matmul` if activation is set.

    One launch.
    """
    rows, (outs, ins) = x.shape[0], (packed.shape[0], 2 * packed.shape[1])
    group = ins // grid.shape[1]
    launcher, blocks = _launcher(
        *(rows, ins, outs, group, x.dtype, grid.dtype, dot_dtype(x), activation)
    )
    outs = outs if activation is None else outs // 2
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    launcher(
        blocks,
        x.contiguous(),
        packed.view(torch.int32),
        grid.view(torch.int32),
        bias,
        None if residual is None else residual.contiguous(),
        out,
        rows,
        ins // TILE_INPUTS,
        outs,
        group,
    )
    return out


@cache
def _launcher(
    rows: int,
    ins: int,
    outs: int,
    group: int,
    dtype: torch.dtype,
    grid_dtype: torch.dtype,
    operand_dtype: Any,
    activation: ActivationKind | None,
) -> tuple[Launcher, tuple[int, ...]]:
    """The launcher and the grid. operand_dtype: of tl.dot."""
    tile = choose_int4_tile(rows, outs, group)
    launcher = Launcher(
        _int4_gemm_kernel,
        activation=activation,
        **_constants(tile, ins, group, float_type(dtype), float_type(grid_dtype)),
        dot_dtype=operand_dtype,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    return launcher, (ceil_div(rows, tile.rows), ceil_div(outs, tile.outputs))


def _constants(
    tile: GemmTile, ins: int, group: int, code_type: Any, grid_type: Any
) -> dict[str, Any]:
    """Return constexpr arguments; activation and dot_dtype are left out.

    code_type: of the floats that codes are put into. grid_type: of scales and zeros.
    """
    return {
        "float_type": code_type,
        "grid_type": grid_type,
        "dots_per_group": parts_per_group(group),
        "warps": tile.num_warps,
        "stages": tile.num_stages,
        "even": ins % (TILE_INPUTS * tile.num_warps) == 0,
        "outputs": tile.outputs,
        "padded_rows": tile.rows,
    }


@triton.jit
def _interleave(low, high):
    """[.., words] twice -> [.., 2 * words], alternating."""
    return tl.reshape(tl.join(low, high), [low.shape[0], low.shape[1], 2 * low.shape[2]])


@triton.jit(do_not_specialize=["rows"])
def _int4_gemm_kernel(
    x, words, grid, bias, residual, out, rows, tiles, outs, group_size,
    activation: tl.constexpr, float_type: tl.constexpr, grid_type: tl.constexpr,
    dots_per_group: tl.constexpr, warps: tl.constexpr, stages: tl.constexpr, even: tl.constexpr,
    dot_dtype: tl.constexpr, outputs: tl.constexpr, padded_rows: tl.constexpr,
    pdl: tl.constexpr = False,
):  # fmt: skip
    """Warp w computes tiles w, w + warps, ...: [warps, outputs, 32] @ [warps, 32, padded rows]."""
    wait_for_previous_kernel(pdl)
    block = tl.program_id(1)
    row = tl.program_id(0) * padded_rows + tl.arange(0, padded_rows)
    own = weight_row_ids(block, outs, outputs, activation is not None)
    exponent: tl.constexpr = 0x4300 if float_type == tl.bfloat16 else 0x6400
    one: tl.constexpr = 0x3F80 if float_type == tl.bfloat16 else 0x3C00
    surplus: tl.constexpr = 128.0 if float_type == tl.bfloat16 else 1024.0
    ins = tiles * 128
    groups = ins // group_size
    warp = tl.arange(0, warps)
    w_at = (
        words
        + own.to(tl.int64)[None, :, None] * (tiles * 16)
        + (warp[:, None, None] * 16 + tl.arange(0, 16)[None, None, :])
    )
    x_k = warp[:, None, None] * 128 + tl.arange(0, 32)[None, :, None]
    x_at = x + row.to(tl.int64)[None, None, :] * ins + x_k
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
                k = tile * 128 + (part + i) * 32
                a = tl.load(x_at + k, mask=here, other=0.0).to(dot_dtype)
                digits = ((w >> (4 * (part + i))) & 0x000F000F) | (exponent << 16 | exponent)
                low, high = split_float_pairs(digits, float_type)
                summed = tl.dot(
                    _interleave(low, high).to(dot_dtype), a, summed, input_precision="ieee"
                )
                inputs = tl.dot(ones, a, inputs, input_precision="ieee")
            total += scale.to(tl.float32) * (summed - (zero.to(tl.float32) + surplus) * inputs)
    result = tl.sum(total, 0)
    gemm_epilogue(result, None, bias, residual, out, block, own, row, rows, outs, activation)


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model by rows and group size; some with a remainder, one in float16."""
    for rows, ins, outs, group, kind, activation in (
        (4, 4096, 4096, 128, "*bf16", None),
        (4, 4096, 28672, 128, "*bf16", "silu"),
        (4, 4096, 6144, 64, "*bf16", None),
        (8, 896, 9728, 32, "*bf16", "silu"),
        (8, 14336, 4096, 128, "*fp16", None),
        (16, 4096, 4096, 128, "*bf16", None),
        (16, 4096, 28672, 64, "*bf16", "silu"),
        (16, 4096, 28672, 128, "*fp16", "silu"),
        (16, 896, 9728, 32, "*bf16", "silu"),
        (16, 896, 4864, 64, "*bf16", None),
    ):
        tile = choose_int4_tile(rows, outs, group)
        of = tl.float16 if kind == "*fp16" else tl.bfloat16
        constants: dict[str, Any] = {
            "activation": activation,
            **_constants(tile, ins, group, of, tl.float16),
            "dot_dtype": of,
        }
        types = {
            **dict.fromkeys(("x", "bias", "residual", "out"), kind),
            **dict.fromkeys(("words", "grid"), "*i32"),
            **dict.fromkeys(("rows", "tiles", "outs", "group_size"), "i32"),
            **dict.fromkeys(constants, "constexpr"),
        }
        yield Variant(
            name=f"int4-{rows}-{ins}-{outs}-{group}-{kind}-{activation}",
            kernel=_int4_gemm_kernel,
            signature={name: types[name] for name in _int4_gemm_kernel.arg_names if name in types},
            constants=constants,
            num_warps=tile.num_warps,
            max_registers=tile.max_registers,
        )
