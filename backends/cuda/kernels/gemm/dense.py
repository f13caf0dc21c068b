"""Matrix products of a few rows with a dense weight: memory-bound, each weight is read once.

One row: a GEMV in which each thread accumulates partial sums of a few outputs. More rows:
`skinny_gemm_triton`, on tensor cores with the weight as the M operand, so that the rows are padded
to 8 instead of 16. In both, the warps of a program split the inputs (split-K) and are summed in a
fixed order at the end: no workspace, no second launch, bitwise deterministic.

The GEMV also computes the RMSNorm before it: each program reads all of x anyway, so it sums the
squares next to the products, and scales the result.
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
from torch.nn import functional

from localgen.backends.cuda.kernels.activation import (
    gated_activation,
    gated_activation_reference,
)
from localgen.backends.cuda.kernels.dependent_launch import wait_for_previous_kernel
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel, max_rows
from localgen.backends.cuda.kernels.gemm.tile import (
    ActivationKind,
    GemmTile,
    cast_for_dot,
    dot_dtype,
    gemm_epilogue,
    weight_row_ids,
)
from localgen.backends.cuda.kernels.launch import Launcher, Variant, ceil_div
from localgen.backends.cuda.kernels.norm import RMSNorm, rms_norm

# more rows use cuBLAS
MAX_SKINNY_ROWS = max_rows(Kernel.SKINNY_GEMM)
# the number of inputs must be a multiple of this, for 16-byte loads
INPUT_MULTIPLE = 16
# limit per thread of a GEMV with a norm: otherwise the compiler spills some to fit more programs
NORMED_REGISTERS = 80


def choose_gemv_tile(ins: int, outs: int) -> GemmTile:
    """Return the tile for a single row.

    4.3 TB/s at about 1 µs of latency need 33 KB in flight on each of 132 SMs. A program of
    4 outputs x 16 bytes x 128 threads has 8 KB in flight; at 48 to 64 registers 8 to 10 programs
    fit on an SM: 64 KB. Small weights use smaller tiles, to have programs for every SM.
    """
    return GemmTile(4 if outs >= 2048 else 2, 256, 1, 4 if ins > 1024 else 2)


def choose_skinny_gemm_tile(rows: int, outs: int, item_bytes: int) -> GemmTile:
    """Return the tile for 2 or more rows; above 32 rows, programs share weights through L2.

    stages - 2 or stages - 1 tiles are in flight: at 4096 outputs, 256 programs of 2 x 16 KB (bf16)
    or 4 x 8 KB (FP8), 62 KB per SM; at 28672 outputs, 896 programs, 4 per SM, twice that. Together
    with the rows, all fit in 99 KB of shared memory.
    """
    padded = 8 if rows <= 8 else 16 if rows <= 16 else 32
    stages = 6 if padded * item_bytes == 8 else 4
    wide = padded > 8 or outs > 8192
    return GemmTile(32, 64, padded, 4, stages) if wide else GemmTile(16, 64, padded, 8, stages)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: RMSNorm | None = None,
) -> Tensor:
    """Return norm(x) @ weight.T + bias + residual, [rows, outs] in x's dtype.

    x: [rows, ins]. weight: [outs, ins], in x's dtype. bias: [outs]. residual: [rows, outs].
    Accumulated in float32. One launch with one row, otherwise one more for the norm.
    """
    match choose_kernel("dense", x, fits=supports_triton_gemm(x, weight)):
        case Kernel.GEMV:
            return matmul_triton(x, weight, bias, residual, norm=norm)
        case Kernel.SKINNY_GEMM:
            return skinny_gemm_triton(normed(x, norm), weight, None, bias, residual)
    return matmul_reference(normed(x, norm), weight, bias, residual)


def gated_matmul(
    x: Tensor, weight: Tensor, activation: ActivationKind, *, norm: RMSNorm | None = None
) -> Tensor:
    """Return act(gate) * up of norm(x), [rows, outs / 2]. weight: gate rows, then up rows."""
    match choose_kernel("dense", x, fits=supports_triton_gemm(x, weight)):
        case Kernel.GEMV:
            return matmul_triton(x, weight, activation=activation, norm=norm)
        case Kernel.SKINNY_GEMM:
            return skinny_gemm_triton(normed(x, norm), weight, None, activation=activation)
    return gated_activation(linear(normed(x, norm), weight), activation)


def normed(x: Tensor, norm: RMSNorm | None) -> Tensor:
    """norm(x), by a kernel of its own; x if there is no norm."""
    if norm is None:
        return x
    return rms_norm(x, norm.weight, norm.eps, offset=False, residual=None)[0]


def supports_triton_gemm(x: Tensor, weight: Tensor) -> bool:
    """True if the kernels support these: 16-bit x, contiguous weight of whole 16-byte loads."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[0] > 0
        and weight.shape[1] % INPUT_MULTIPLE == 0
        and weight.is_contiguous()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, rounded once to x's dtype."""
    if x.device.type != "cpu" or x.dtype.itemsize > 2:
        return functional.linear(x, weight, bias)
    # on a CPU torch computes half precision in a plain loop, up to 8 times slower than float32
    wide_bias = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), wide_bias).to(x.dtype)


def matmul_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """PyTorch reference of `matmul` without a norm, cuBLAS on a GPU."""
    out = linear(x, weight, bias)
    return out if residual is None else out + residual


def gated_matmul_reference(x: Tensor, weight: Tensor, activation: ActivationKind) -> Tensor:
    """PyTorch reference of `gated_matmul` without a norm."""
    return gated_activation_reference(linear(x, weight), activation)


def matmul_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: ActivationKind | None = None,
    norm: RMSNorm | None = None,
) -> Tensor:
    """Triton implementation of `matmul`, or of `gated_matmul` if activation is set."""
    if x.shape[0] > 1:
        return skinny_gemm_triton(
            normed(x, norm), weight, None, bias, residual, activation=activation
        )
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


def skinny_gemm_triton(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: ActivationKind | None = None,
) -> Tensor:
    """Triton implementation of `matmul` and `gated_matmul` for up to about 64 rows.

    weight: in x's dtype or float8_e4m3fn. scale: float32 [outs], one per output of the weight, or
    None.
    """
    rows, (outs, ins) = x.shape[0], weight.shape
    launcher, grid = _skinny_gemm_launcher(
        rows, ins, outs, weight.element_size(), dot_dtype(x), activation
    )
    outs = outs if activation is None else outs // 2
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    launcher(
        grid,
        x.contiguous(),
        weight,
        scale,
        bias,
        None if residual is None else residual.contiguous(),
        out,
        rows,
        ins // INPUT_MULTIPLE,
        outs,
    )
    return out


@cache
def _skinny_gemm_launcher(
    rows: int,
    ins: int,
    outs: int,
    item_bytes: int,
    dtype: Any,
    activation: ActivationKind | None,
) -> tuple[Launcher, tuple[int, ...]]:
    """The launcher and the grid. dtype: of tl.dot."""
    tile = choose_skinny_gemm_tile(rows, outs, item_bytes)
    launcher = Launcher(
        _skinny_gemm_kernel,
        dot_dtype=dtype,
        activation=activation,
        outputs=tile.outputs,
        inputs=tile.inputs,
        padded_rows=tile.rows,
        warps=tile.num_warps,
        stages=tile.num_stages,
        even=ins % (tile.inputs * tile.num_warps) == 0,
        num_warps=tile.num_warps,
    )
    # programs that read the same weights are adjacent, so that they hit L2
    return launcher, (ceil_div(rows, tile.rows), ceil_div(outs, tile.outputs))


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


@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm_kernel(
    x,
    weight,
    scale,
    bias,
    residual,
    out,
    rows,
    ins_16,
    outs,
    dot_dtype: tl.constexpr,
    activation: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    padded_rows: tl.constexpr,
    warps: tl.constexpr,
    stages: tl.constexpr,
    even: tl.constexpr,
    pdl: tl.constexpr = False,
):
    """One dot per warp: [warps, outputs, inputs] @ [warps, inputs, padded rows]."""
    wait_for_previous_kernel(pdl)
    ins = ins_16 * 16
    block = tl.program_id(1)
    row = tl.program_id(0) * padded_rows + tl.arange(0, padded_rows)
    own = weight_row_ids(block, outs, outputs, activation is not None)
    first = tl.arange(0, warps)[:, None, None] * inputs
    w_k = first + tl.arange(0, inputs)[None, None, :]
    x_k = first + tl.arange(0, inputs)[None, :, None]
    w_at = weight + own.to(tl.int64)[None, :, None] * ins + w_k
    x_at = x + row.to(tl.int64)[None, None, :] * ins + x_k
    given = (row < rows)[None, None, :]
    total = tl.zeros([warps, outputs, padded_rows], tl.float32)
    for k in tl.range(0, ins, warps * inputs, num_stages=stages):
        if even:
            w = tl.load(w_at + k, eviction_policy="evict_first")
            a = tl.load(x_at + k, mask=given, other=0.0)
        else:
            w = tl.load(w_at + k, mask=w_k < ins - k, other=0.0, eviction_policy="evict_first")
            a = tl.load(x_at + k, mask=given & (x_k < ins - k), other=0.0)
        total = tl.dot(cast_for_dot(w, dot_dtype), a.to(dot_dtype), total, input_precision="ieee")
    gemm_epilogue(
        tl.sum(total, 0), scale, bias, residual, out, block, own, row, rows, outs, activation
    )


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
    yield skinny_gemm_variant(8, 4096, 6144, "*bf16", None)
    yield skinny_gemm_variant(8, 4096, 28672, "*bf16", "silu")
    yield skinny_gemm_variant(8, 896, 4864, "*bf16", "gelu_tanh")
    yield skinny_gemm_variant(2, 4096, 4096, "*fp16", None)


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


def skinny_gemm_variant(
    rows: int, ins: int, outs: int, weight_type: str, activation: ActivationKind | None
) -> Variant:
    """Return the variant that skinny_gemm_triton launches. weight_type: Triton pointer type."""
    small = weight_type == "*fp8e4nv"
    tile = choose_skinny_gemm_tile(rows, outs, 1 if small else 2)
    pointer = "*bf16" if small else weight_type
    constants: dict[str, Any] = {
        "dot_dtype": tl.float16 if pointer == "*fp16" else tl.bfloat16,
        "activation": activation,
        "outputs": tile.outputs,
        "inputs": tile.inputs,
        "padded_rows": tile.rows,
        "warps": tile.num_warps,
        "stages": tile.num_stages,
        "even": ins % (tile.inputs * tile.num_warps) == 0,
    }
    if not small:
        constants["scale"] = None
    signature = {
        "x": pointer,
        "weight": weight_type,
        "scale": "*fp32" if small else "constexpr",
        **dict.fromkeys(("bias", "residual", "out"), pointer),
        **dict.fromkeys(("rows", "ins_16", "outs"), "i32"),
    }
    return Variant(
        name=f"skinny-gemm-{weight_type}-{rows}-{ins}-{outs}-{activation}",
        kernel=_skinny_gemm_kernel,
        signature=signature | {name: "constexpr" for name in constants if name not in signature},
        constants=constants,
        num_warps=tile.num_warps,
        min_arch=89 if small else 80,
    )
