"""Matrix product with 4-bit weights of int4_format, up to about 64 rows: memory-bound.

The exponent that turns codes into floats is an offset, subtracted at the end of a group, using a
product with ones; scales multiply sums of integers, in float32. With one row, each program also
computes the RMSNorm before the product.
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
from localgen.backends.cuda.kernels.launch import Launcher, Variant, ceil_div, next_power_of_2
from localgen.backends.cuda.kernels.norm import RMSNorm

# with more rows, tiles of small groups do not fit in registers: int4_wide computes them
MAX_SMALL_GROUP_ROWS = 16
MAX_REGISTERS = 255


def has_small_groups(group_size: int) -> bool:
    """True if each part of a tile of codes has a scale of its own."""
    return parts_per_group(group_size) == 1


def choose_int4_tile(rows: int, outs: int, group_size: int) -> GemmTile:
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
    # at the limit, the registers of two programs fit: the compiler spills some to fit a third, for
    # which shared memory has no room
    if rows <= MAX_SMALL_GROUP_ROWS or has_small_groups(group_size):
        return GemmTile(32, TILE_INPUTS, 16, 4, 4, MAX_REGISTERS)
    return GemmTile(32, TILE_INPUTS, 32, 4, 3, MAX_REGISTERS)


def int4_matmul_triton(
    x: Tensor,
    packed: Tensor,
    grid: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: ActivationKind | None = None,
    norm: RMSNorm | None = None,
) -> Tensor:
    """Triton implementation of `int4_matmul`, or of `int4_gated_matmul` if activation is set.

    Up to about 64 rows, 16 with small groups, one if there is a norm; one launch.
    """
    rows, (outs, ins) = x.shape[0], (packed.shape[0], 2 * packed.shape[1])
    assert norm is None or rows == 1
    group = ins // grid.shape[1]
    launcher, blocks = _launcher(
        *(rows, ins, outs, group, x.dtype, grid.dtype, dot_dtype(x), activation),
        norm is not None,
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
        None if norm is None else norm.weight,
        out,
        0.0 if norm is None else norm.eps,
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
    has_norm: bool,
) -> tuple[Launcher, tuple[int, ...]]:
    """The launcher and the grid. operand_dtype: of tl.dot."""
    tile = choose_int4_tile(rows, outs, group)
    launcher = Launcher(
        _int4_gemm_kernel,
        activation=activation,
        **int4_constants(tile, ins, group, float_type(dtype), float_type(grid_dtype), has_norm),
        dot_dtype=operand_dtype,
        outputs=tile.outputs,
        padded_rows=tile.rows,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    return launcher, (ceil_div(rows, tile.rows), ceil_div(outs, tile.outputs))


def int4_constants(
    tile: GemmTile, ins: int, group: int, code_type: Any, grid_type: Any, has_norm: bool
) -> dict[str, Any]:
    """Return constexpr arguments of `accumulate_int4`; dot_dtype is left out.

    code_type: of the floats that codes are put into. grid_type: of scales and zeros.
    """
    return {
        "float_type": code_type,
        "grid_type": grid_type,
        "dots_per_group": parts_per_group(group),
        "warps": tile.num_warps,
        "stages": tile.num_stages,
        "even": ins % (TILE_INPUTS * tile.num_warps) == 0,
        "norm_block": next_power_of_2(ins) if has_norm else 0,
    }


@triton.jit
def _interleave(low, high):
    """[.., words] twice -> [.., 2 * words], alternating."""
    return tl.reshape(tl.join(low, high), [low.shape[0], low.shape[1], 2 * low.shape[2]])


@triton.jit
def _quarters(values):
    """[tiles, inputs] -> its four quarters [tiles, inputs / 4]. As single loads, these would be of
    two bytes a thread, too few to be copied ahead."""
    tiles: tl.constexpr = values.shape[0]
    size: tl.constexpr = values.shape[1] // 4
    turned = tl.permute(tl.reshape(values, [tiles, 4, size]), [0, 2, 1])
    even, odd = tl.split(tl.reshape(turned, [tiles, size, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def accumulate_int4(
    x, norm, words, grid, own, row, rows, tiles, group_size, eps,
    float_type: tl.constexpr, grid_type: tl.constexpr, dot_dtype: tl.constexpr,
    dots_per_group: tl.constexpr, warps: tl.constexpr, stages: tl.constexpr, even: tl.constexpr,
    norm_block: tl.constexpr,
):  # fmt: skip
    """Return norm(x) @ weight.T of the weight rows `own`, float32 [outputs, padded rows].

    Warp w computes tiles w, w + warps, ...: [warps, outputs, 32] @ [warps, 32, padded rows]. norm:
    None, or [ins] if x is one row; norm_block: power of two that is not below its size.
    """
    exponent: tl.constexpr = 0x4300 if float_type == tl.bfloat16 else 0x6400
    one: tl.constexpr = 0x3F80 if float_type == tl.bfloat16 else 0x3C00
    surplus: tl.constexpr = 128.0 if float_type == tl.bfloat16 else 1024.0
    outputs: tl.constexpr = own.shape[0]
    padded_rows: tl.constexpr = row.shape[0]
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
    if norm is not None:
        at = tl.arange(0, norm_block)
        values = tl.load(x + at, mask=at < ins, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(values * values) / ins + eps)
        # inputs are scaled by a power of two, which rounds nothing and keeps them in range; the
        # rest of the factor scales the result
        power = tl.exp2(tl.floor(tl.log2(factor)))
        norm_at = norm + warp[:, None] * 128 + tl.arange(0, 128)[None, :]
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
        if norm is not None:
            there = (tile + warp < tiles)[:, None]
            norms = _quarters(tl.load(norm_at + tile * 128, mask=there, other=0.0))
        for part in tl.static_range(0, 4, dots_per_group):
            both = tl.load(g_at + ((mine * 128 + part * 32) // group_size)[:, None])[:, :, None]
            scale, zero = split_float_pairs(both, grid_type)
            summed = tl.zeros([warps, outputs, padded_rows], tl.float32)
            inputs = tl.zeros([warps, outputs, padded_rows], tl.float32)
            for i in tl.static_range(dots_per_group):
                k = tile * 128 + (part + i) * 32
                a = tl.load(x_at + k, mask=here, other=0.0).to(dot_dtype)
                if norm is not None:
                    a = a * power.to(dot_dtype) * norms[part + i].to(dot_dtype)[:, :, None]
                digits = ((w >> (4 * (part + i))) & 0x000F000F) | (exponent << 16 | exponent)
                low, high = split_float_pairs(digits, float_type)
                summed = tl.dot(
                    _interleave(low, high).to(dot_dtype), a, summed, input_precision="ieee"
                )
                inputs = tl.dot(ones, a, inputs, input_precision="ieee")
            total += scale.to(tl.float32) * (summed - (zero.to(tl.float32) + surplus) * inputs)
    result = tl.sum(total, 0)
    if norm is not None:
        result *= factor / power
    return result


@triton.jit(do_not_specialize=["rows"])
def _int4_gemm_kernel(
    x, words, grid, bias, residual, norm, out, eps, rows, tiles, outs, group_size,
    activation: tl.constexpr, float_type: tl.constexpr, grid_type: tl.constexpr,
    dots_per_group: tl.constexpr, warps: tl.constexpr, stages: tl.constexpr, even: tl.constexpr,
    norm_block: tl.constexpr, dot_dtype: tl.constexpr, outputs: tl.constexpr,
    padded_rows: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    wait_for_previous_kernel(pdl)
    block = tl.program_id(1)
    row = tl.program_id(0) * padded_rows + tl.arange(0, padded_rows)
    own = weight_row_ids(block, outs, outputs, activation is not None)
    result = accumulate_int4(
        x, norm, words, grid, own, row, rows, tiles, group_size, eps, float_type, grid_type,
        dot_dtype, dots_per_group, warps, stages, even, norm_block,
    )  # fmt: skip
    gemm_epilogue(result, None, bias, residual, out, block, own, row, rows, outs, activation)


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model by rows and group size; some with a remainder, one in float16."""
    for rows, ins, outs, group, kind, activation, has_norm in (
        (1, 4096, 4096, 128, "*bf16", None, False),
        (1, 4096, 28672, 128, "*bf16", None, False),
        (1, 4096, 28672, 128, "*bf16", "silu", True),
        (1, 4096, 28672, 128, "*fp16", "silu", True),
        (1, 4096, 6144, 64, "*bf16", None, False),
        (1, 4096, 6144, 32, "*bf16", None, True),
        (1, 896, 9728, 32, "*bf16", "gelu_tanh", True),
        (1, 8192, 57344, 128, "*bf16", "silu", True),
        (8, 896, 9728, 32, "*bf16", "silu", False),
        (8, 14336, 4096, 128, "*fp16", None, False),
        (16, 4096, 4096, 128, "*bf16", None, False),
        (16, 4096, 28672, 64, "*bf16", "silu", False),
        (16, 896, 9728, 32, "*bf16", "silu", False),
        (64, 4096, 4096, 128, "*bf16", None, False),
        (64, 4096, 28672, 128, "*bf16", "silu", False),
        (64, 4096, 28672, 64, "*fp16", "silu", False),
        (64, 896, 4864, 64, "*bf16", None, False),
    ):
        tile = choose_int4_tile(rows, outs, group)
        name = f"int4-{rows}-{ins}-{outs}-{group}-{kind}"
        name += ("" if activation is None else f"-{activation}") + "-normed" * has_norm
        of = tl.float16 if kind == "*fp16" else tl.bfloat16
        constants = {
            "activation": activation,
            **int4_constants(tile, ins, group, of, tl.float16, has_norm),
            "dot_dtype": of,
            "outputs": tile.outputs,
            "padded_rows": tile.rows,
        }
        yield _variant(name, tile, kind, constants, has_norm)


def _variant(
    title: str,
    tile: GemmTile,
    input_type: str,
    constants: dict[str, Any],
    has_norm: bool,
) -> Variant:
    """Return a variant. input_type: Triton pointer type of x. constants: constexpr arguments."""
    constants = constants if has_norm else constants | {"norm": None}
    types = {
        **dict.fromkeys(("x", "bias", "residual", "norm", "out"), input_type),
        **dict.fromkeys(("words", "grid"), "*i32"),
        "eps": "fp32",
        **dict.fromkeys(("rows", "tiles", "outs", "group_size"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return Variant(
        name=title,
        kernel=_int4_gemm_kernel,
        signature={name: types[name] for name in _int4_gemm_kernel.arg_names if name in types},
        constants=constants,
        num_warps=tile.num_warps,
        max_registers=tile.max_registers,
    )
