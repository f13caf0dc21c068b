"""Matrix product of a single row with 4-bit weights of int4_format: each weight is read once.

As in gemv, each thread sums products in float32 and the warps of a program divide the inputs: no
tensor cores, no shared memory, no second launch. A code becomes a float by two instructions, a
shift and an `and` with an `or`: in the upper bits of the mantissa of 128. The 128 is subtracted
with the zero, once for each part of a group.
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
    gemm_epilogue,
    weight_row_ids,
)
from localgen.backends.cuda.kernels.launch import Launcher, Variant, ceil_div
from localgen.backends.cuda.kernels.norm import RMSNorm

# a thread loads 16 bytes of each output: 32 codes
_THREAD_INPUTS = 32


def choose_int4_gemv_tile(outs: int, group_size: int) -> GemmTile:
    """Return the tile for a single row: the fastest of those tried on an H100.

    More outputs share the conversion of the inputs; fewer make more programs, and leave registers
    for the scales of small groups.
    """
    few = outs <= 4096 or has_small_groups(group_size)
    # eight or six programs fit on an SM
    outputs, registers = (4, 128) if few else (8, 168)
    return GemmTile(outputs, 32 * _THREAD_INPUTS, 1, 2, max_registers=registers)


def int4_gemv_triton(
    x: Tensor,
    packed: Tensor,
    grid: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: ActivationKind | None = None,
    norm: RMSNorm | None = None,
) -> Tensor:
    """Triton implementation of `int4_matmul` for one row of 16-bit floats, or of
    `int4_gated_matmul` if activation is set."""
    outs, ins = packed.shape[0], 2 * packed.shape[1]
    group = ins // grid.shape[1]
    launcher, blocks = _launcher(ins, outs, group, x.dtype, grid.dtype, activation)
    outs = outs if activation is None else outs // 2
    out = torch.empty((1, outs), dtype=x.dtype, device=x.device)
    launcher(
        blocks,
        word_view(x),
        packed.view(torch.int32),
        grid.view(torch.int32),
        bias,
        None if residual is None else residual.contiguous(),
        None if norm is None else word_view(norm.weight),
        out,
        0.0 if norm is None else norm.eps,
        ins // TILE_INPUTS,
        outs,
    )
    return out


def word_view(x: Tensor) -> Tensor:
    """View 16-bit floats as words of two."""
    return x.contiguous().view(torch.int32)


@cache
def _launcher(
    ins: int,
    outs: int,
    group: int,
    dtype: torch.dtype,
    grid_dtype: torch.dtype,
    activation: ActivationKind | None,
) -> tuple[Launcher, tuple[int, ...]]:
    """The launcher and the grid."""
    tile = choose_int4_gemv_tile(outs, group)
    launcher = Launcher(
        _int4_gemv_kernel,
        activation=activation,
        **int4_gemv_constants(tile, ins, group, float_type(dtype), float_type(grid_dtype)),
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    return launcher, (ceil_div(outs, tile.outputs),)


def int4_gemv_constants(
    tile: GemmTile, ins: int, group: int, input_type: Any, grid_type: Any
) -> dict[str, Any]:
    """Return constexpr arguments of the kernels. input_type, grid_type: of inputs, of scales."""
    step = tile.inputs * tile.num_warps
    return {
        "input_type": input_type,
        "grid_type": grid_type,
        "group_size": group,
        "dots_per_group": parts_per_group(group),
        "outputs": tile.outputs,
        "step": step // 8,
        "even": ins % step == 0,
    }


@triton.jit
def _widen_pairs(both, kind: tl.constexpr):
    """Split words of two 16-bit floats: int32 -> two of float32."""
    if kind == tl.bfloat16:
        return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(
            tl.float32, bitcast=True
        )
    low, high = split_float_pairs(both, kind)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _load_words(pointers, inside, even: tl.constexpr, eviction: tl.constexpr):
    if even:
        return tl.load(pointers, eviction_policy=eviction)
    return tl.load(pointers, mask=inside, other=0, eviction_policy=eviction)


@triton.jit
def accumulate_int4_row(
    x, norm, words, grid, own, tiles,
    input_type: tl.constexpr, grid_type: tl.constexpr, group_size: tl.constexpr,
    dots_per_group: tl.constexpr, step: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """Return partial sums of (x * norm) @ weight of the rows `own`, float32 [outputs, step / 4],
    and of x * x.

    x, norm: words of two inputs; norm may be None. step: words of codes per iteration. Each thread
    has four words of each output, and the inputs of these words.
    """
    outputs: tl.constexpr = own.shape[0]
    quarter: tl.constexpr = step // 4
    num_words = tiles * 16
    # a factor that is always 1 keeps the compiler from taking `and` and `or` for two constants,
    # which would be two instructions
    exponent = 0x43000000 * (1 + tl.program_id(2))
    at = tl.arange(0, step)
    w_at = words + own.to(tl.int64)[:, None] * num_words + at[None, :]
    x_at = at // 16 * 64 + at % 16
    g_at = grid + own.to(tl.int64)[:, None] * (tiles * 128 // group_size)
    total = tl.zeros([outputs, quarter], tl.float32)
    squares = tl.zeros([quarter], tl.float32)
    for k in range(0, num_words, step):
        inside = at < num_words - k
        w = _load_words(w_at + k, inside[None, :], even, "evict_first")
        tile = k // 16 + tl.arange(0, quarter) // 4
        if not even:
            tile = tl.minimum(tile, tiles - 1)
        for part in tl.static_range(0, 4, dots_per_group):
            group = (tile * 128 + part * 32) // group_size
            scale, zero = _widen_pairs(tl.load(g_at + group[None, :]), grid_type)
            summed = tl.zeros([outputs, step], tl.float32)
            inputs = tl.zeros([step], tl.float32)
            for i in tl.static_range(part, part + dots_per_group):
                pairs = _load_words(x + k * 4 + x_at + 16 * i, inside, even, "")
                low, high = _widen_pairs(pairs, input_type)
                if norm is not None:
                    squared = tl.reshape(low * low + high * high, [quarter, 4])
                    squares += tl.sum(squared, 1)
                    pairs = _load_words(norm + k * 4 + x_at + 16 * i, inside, even, "")
                    low_norm, high_norm = _widen_pairs(pairs, input_type)
                    low *= low_norm
                    high *= high_norm
                inputs += low + high
                low_code = ((w << (16 - 4 * i)) & 0x000F0000) | exponent
                high_code = ((w >> (4 * i)) & 0x000F0000) | exponent
                summed += low_code.to(tl.float32, bitcast=True) * low[None, :]
                summed += high_code.to(tl.float32, bitcast=True) * high[None, :]
            found = tl.sum(tl.reshape(summed, [outputs, quarter, 4]), 2)
            offset = tl.sum(tl.reshape(inputs, [quarter, 4]), 1)
            total += scale * (found - (zero + 128.0) * offset[None, :])
    return total, squares


@triton.jit
def _int4_gemv_kernel(
    x, words, grid, bias, residual, norm, out, eps, tiles, outs,
    activation: tl.constexpr, input_type: tl.constexpr, grid_type: tl.constexpr,
    group_size: tl.constexpr, dots_per_group: tl.constexpr, outputs: tl.constexpr,
    step: tl.constexpr, even: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    wait_for_previous_kernel(pdl)
    block = tl.program_id(0)
    own = weight_row_ids(block, outs, outputs, activation is not None)
    total, squares = accumulate_int4_row(
        x, norm, words, grid, own, tiles, input_type, grid_type, group_size, dots_per_group, step,
        even,
    )  # fmt: skip
    summed = tl.sum(total, 1)
    if norm is not None:
        summed *= tl.rsqrt(tl.sum(squares) / (tiles * 128) + eps)
    row = tl.arange(0, 1)
    gemm_epilogue(summed[:, None], None, bias, residual, out, block, own, row, 1, outs, activation)


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model by group size; some with a remainder, one in float16."""
    shapes: tuple[tuple[int, int, int, str, ActivationKind | None, bool], ...] = (
        (4096, 4096, 128, "*bf16", None, False),
        (4096, 28672, 128, "*bf16", "silu", True),
        (4096, 28672, 128, "*fp16", "silu", True),
        (14336, 4096, 128, "*bf16", None, False),
        (4096, 6144, 64, "*bf16", None, False),
        (4096, 6144, 32, "*bf16", None, True),
        (896, 9728, 32, "*bf16", "gelu_tanh", True),
        (8192, 57344, 128, "*bf16", "silu", True),
    )
    for ins, outs, group, kind, activation, has_norm in shapes:
        yield _variant(ins, outs, group, kind, activation, has_norm)


def _variant(
    ins: int, outs: int, group: int, kind: str, activation: ActivationKind | None, has_norm: bool
) -> Variant:
    tile = choose_int4_gemv_tile(outs, group)
    of = tl.float16 if kind == "*fp16" else tl.bfloat16
    constants: dict[str, Any] = {
        "activation": activation,
        **int4_gemv_constants(tile, ins, group, of, tl.float16),
    }
    if not has_norm:
        constants["norm"] = None
    types = {
        **dict.fromkeys(("bias", "residual", "out"), kind),
        **dict.fromkeys(("x", "words", "grid", "norm"), "*i32"),
        "eps": "fp32",
        **dict.fromkeys(("tiles", "outs"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return Variant(
        name=f"int4-gemv-{ins}-{outs}-{group}-{kind}-{activation}" + "-normed" * has_norm,
        kernel=_int4_gemv_kernel,
        signature={name: types[name] for name in _int4_gemv_kernel.arg_names if name in types},
        constants=constants,
        num_warps=tile.num_warps,
        max_registers=tile.max_registers,
    )
