"""Matrix products with 4-bit weights of int4_format: the kernel for each number of rows, and the
reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from localgen.backends.cuda.kernels.activation import (
    gated_activation,
    gated_activation_reference,
)
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.gemm.dense import matmul_reference, normed
from localgen.backends.cuda.kernels.gemm.int4_format import (
    PART_INPUTS,
    dequantize_int4,
    dequantize_int4_triton,
    is_tiled,
)
from localgen.backends.cuda.kernels.gemm.int4_gemm import int4_matmul_triton
from localgen.backends.cuda.kernels.gemm.int4_gemv import int4_gemv_triton
from localgen.backends.cuda.kernels.gemm.int4_wide import int4_wide_matmul_triton
from localgen.backends.cuda.kernels.gemm.tile import ActivationKind
from localgen.backends.cuda.kernels.norm import RMSNorm


def int4_matmul(
    x: Tensor,
    packed: Tensor,
    grid: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: RMSNorm | None = None,
) -> Tensor:
    """Return norm(x) @ weight.T + bias + residual, [rows, outs] in x's dtype, summed in float32.

    x: [rows, ins], inputs in the order of the packed weight. packed: uint8 [outs, ins / 2] from
    `pack_int4`. grid: [outs, groups, 2] from `pack_grid`. bias: [outs]. residual: [rows, outs]. One
    launch with one row, otherwise one more for the norm.
    """
    match choose_int4_kernel(x, packed, grid):
        case Kernel.INT4_GEMV:
            return int4_gemv_triton(x, packed, grid, bias, residual, norm=norm)
        case Kernel.INT4_GEMM:
            return int4_matmul_triton(normed(x, norm), packed, grid, bias, residual)
        case Kernel.INT4_WIDE:
            return int4_wide_matmul_triton(normed(x, norm), packed, grid, bias, residual)
        case Kernel.INT4_DEQUANTIZE:
            weight = dequantize_int4_triton(packed, grid, x.dtype)
            out = functional.linear(normed(x, norm), weight, bias)
        case _:
            return int4_matmul_reference(normed(x, norm), packed, grid, bias, residual)
    return out if residual is None else out + residual


def int4_gated_matmul(
    x: Tensor,
    packed: Tensor,
    grid: Tensor,
    activation: ActivationKind,
    *,
    norm: RMSNorm | None = None,
) -> Tensor:
    """Return act(gate) * up of norm(x), [rows, outs / 2]. packed, grid: gate rows, then up rows."""
    match choose_int4_kernel(x, packed, grid):
        case Kernel.INT4_GEMV:
            return int4_gemv_triton(x, packed, grid, activation=activation, norm=norm)
        case Kernel.INT4_GEMM:
            return int4_matmul_triton(normed(x, norm), packed, grid, activation=activation)
    return gated_activation(int4_matmul(x, packed, grid, norm=norm), activation)


def choose_int4_kernel(x: Tensor, packed: Tensor, grid: Tensor) -> Kernel:
    """Return the kernel of `int4_matmul`."""
    ins = 2 * packed.shape[1]
    group = ins // grid.shape[1]
    fits = is_tiled(ins) and group % PART_INPUTS == 0 and packed.is_contiguous()
    return choose_kernel("int4", x, fits=fits)


def int4_matmul_reference(
    x: Tensor,
    packed: Tensor,
    grid: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """PyTorch reference of `int4_matmul` without a norm; the weight is rounded to x's dtype."""
    return matmul_reference(x, dequantize_int4(packed, grid, x.dtype), bias, residual)


def int4_gated_matmul_reference(
    x: Tensor, packed: Tensor, grid: Tensor, activation: ActivationKind
) -> Tensor:
    """PyTorch reference of `int4_gated_matmul` without a norm."""
    return gated_activation_reference(int4_matmul_reference(x, packed, grid), activation)
