"""Matrix product of a single row with a dense weight: each weight is read once.

Each thread accumulates partial sums of a few outputs. The warps of a program split the inputs
(split-K) and are summed in a fixed order at the end: no workspace, no second launch, bitwise
deterministic. The RMSNorm before the product is computed too: each program reads all of x anyway,
so it sums the squares next to the products, and scales the result.
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
from localgen.backends.cuda.kernels.gemm.tile import (
    INPUT_MULTIPLE,
    ActivationKind,
    GemmTile,
    gemm_epilogue,
    weight_row_ids,
)
from localgen.backends.cuda.kernels.launch import Launcher, Variant, ceil_div
from localgen.backends.cuda.kernels.norm import RMSNorm

# limit per thread of a GEMV with a norm: otherwise the compiler spills some to fit more programs
NORMED_REGISTERS = 80


def choose_gemv_tile(ins: int, outs: int) -> GemmTile:
    """Return the tile for a single row.

    4.3 TB/s at about 1 µs of latency need 33 KB in flight on each of 132 SMs. A program of
    4 outputs x 16 bytes x 128 threads has 8 KB in flight; at 48 to 64 registers 8 to 10 programs
    fit on an SM: 64 KB. Small weights use smaller tiles, to have programs for every SM.
    """
    return GemmTile(4 if outs >= 2048 else 2, 256, 1, 4 if ins > 1024 else 2)


def gemv_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: ActivationKind | None = None,
    norm: RMSNorm | None = None,
) -> Tensor:
    """Triton implementation of `matmul` for one row, or of `gated_matmul` if activation is set."""
    outs, ins = weight.shape
    launcher, grid = _gemv_launcher(ins, outs, activation, norm is not None)
    outs = outs if activation is None else outs // 2
    out = torch.empty((1, outs), dtype=x.dtype, device=x.device)
    launcher(
        grid,
        x.contiguous(),
        weight,
        bias,
        None if residual is None else residual.contiguous(),
        None if norm is None else norm.weight,
        out,
        0.0 if norm is None else norm.eps,
        ins // INPUT_MULTIPLE,
        outs,
    )
    return out


@cache
def _gemv_launcher(
    ins: int, outs: int, activation: ActivationKind | None, normed: bool
) -> tuple[Launcher, tuple[int, ...]]:
    """The launcher and the grid."""
    tile = choose_gemv_tile(ins, outs)
    step = tile.inputs * tile.num_warps
    launcher = Launcher(
        _gemv_kernel,
        activation=activation,
        outputs=tile.outputs,
        step=step,
        even=ins % step == 0,
        num_warps=tile.num_warps,
        maxnreg=NORMED_REGISTERS if normed else None,
    )
    return launcher, (ceil_div(outs, tile.outputs),)


@triton.jit
def accumulate_gemv(
    x, norm, weight, weight_rows, ins,
    step: tl.constexpr, even: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Return partial sums of (x * norm) @ weight, float32 [outputs, step / 4], and of x * x.

    x: [ins]. norm: [ins] or None. Each thread has 8 inputs per step, so that x and the weight have
    the same layout. Summing four products before the sum over steps halves the registers.
    """
    outputs: tl.constexpr = weight_rows.shape[0]
    total = tl.zeros([outputs, step // 4], tl.float32)
    squares = tl.zeros([step // 4], tl.float32)
    at = tl.arange(0, step)
    w_at = weight + weight_rows.to(tl.int64)[:, None] * ins + at[None, :]
    start: tl.constexpr = step if pdl else 0
    if pdl:
        # the first weights are on their way while the kernel before this one ends
        w = _load_inputs(w_at, (at < ins)[None, :], even, "evict_first")
        wait_for_previous_kernel(pdl)
        total, squares = _add_products(total, squares, w, x, norm, at, 0, ins, even)
    for k in range(start, ins, step):
        w = _load_inputs(w_at + k, (at < ins - k)[None, :], even, "evict_first")
        total, squares = _add_products(total, squares, w, x, norm, at, k, ins, even)
    return total, squares


@triton.jit
def _add_products(total, squares, w, x, norm, at, k, ins, even: tl.constexpr):
    """Add the products with the weights w, [outputs, step], of the inputs from k on."""
    outputs: tl.constexpr = w.shape[0]
    quarter: tl.constexpr = w.shape[1] // 4
    a = _load_inputs(x + k + at, at < ins - k, even, "").to(tl.float32)
    if norm is not None:
        squares += tl.sum(tl.reshape(a * a, [quarter, 4]), 1)
        a *= _load_inputs(norm + k + at, at < ins - k, even, "").to(tl.float32)
    products = w.to(tl.float32) * a[None, :]
    total += tl.sum(tl.reshape(products, [outputs, quarter, 4]), 2)
    return total, squares


@triton.jit
def _load_inputs(pointers, inside, even: tl.constexpr, eviction: tl.constexpr):
    if even:
        return tl.load(pointers, eviction_policy=eviction)
    return tl.load(pointers, mask=inside, other=0.0, eviction_policy=eviction)


@triton.jit
def _gemv_kernel(
    x, weight, bias, residual, norm, out, eps, ins_16, outs,
    activation: tl.constexpr, outputs: tl.constexpr, step: tl.constexpr, even: tl.constexpr,
    pdl: tl.constexpr = False,
):  # fmt: skip
    block, ins = tl.program_id(0), ins_16 * 16
    own = weight_row_ids(block, outs, outputs, activation is not None)
    total, squares = accumulate_gemv(x, norm, weight, own, ins, step, even, pdl)
    summed = tl.sum(total, 1)
    if norm is not None:
        summed *= tl.rsqrt(tl.sum(squares) / ins + eps)
    row = tl.arange(0, 1)
    gemm_epilogue(summed[:, None], None, bias, residual, out, block, own, row, 1, outs, activation)


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model, small MoE experts and a router; with and without a remainder."""
    shapes: tuple[tuple[int, int, ActivationKind | None, bool], ...] = (
        (4096, 6144, None, False),
        (4096, 6144, None, True),
        (4096, 28672, "silu", False),
        (4096, 28672, "silu", True),
        (3584, 4608, None, False),
        (2048, 128, None, False),
        (896, 4864, "gelu_tanh", False),
        (896, 4864, "silu", True),
        (512, 1024, None, False),
    )
    for ins, outs, kind, normed in shapes:
        yield _gemv_variant(ins, outs, kind, normed)


def _gemv_variant(ins: int, outs: int, activation: ActivationKind | None, normed: bool) -> Variant:
    tile = choose_gemv_tile(ins, outs)
    step = tile.inputs * tile.num_warps
    constants: dict[str, Any] = {
        "activation": activation,
        "outputs": tile.outputs,
        "step": step,
        "even": ins % step == 0,
    }
    if not normed:
        constants["norm"] = None
    pointers = dict.fromkeys(("x", "weight", "bias", "residual", "norm", "out"), "*bf16")
    return Variant(
        name=f"gemv-{ins}-{outs}-{activation}" + ("-normed" if normed else ""),
        kernel=_gemv_kernel,
        signature=pointers
        | {"eps": "fp32", "ins_16": "i32", "outs": "i32"}
        | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        num_warps=tile.num_warps,
        max_registers=NORMED_REGISTERS if normed else None,
    )
