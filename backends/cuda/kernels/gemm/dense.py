"""Matrix products with a dense weight: the kernel for each number of rows, and the reference.

With few rows they are memory-bound: `gemv` and `skinny_gemm` read each weight once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from localgen.backends.cuda.kernels.activation import (
    gated_activation,
    gated_activation_reference,
)
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel, max_rows
from localgen.backends.cuda.kernels.gemm.gemv import gemv_triton
from localgen.backends.cuda.kernels.gemm.skinny_gemm import skinny_gemm_triton
from localgen.backends.cuda.kernels.gemm.tile import INPUT_MULTIPLE, ActivationKind
from localgen.backends.cuda.kernels.norm import RMSNorm, rms_norm

# more rows use cuBLAS
MAX_SKINNY_ROWS = max_rows(Kernel.SKINNY_GEMM)


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
            return gemv_triton(x, weight, bias, residual, norm=norm)
        case Kernel.SKINNY_GEMM:
            return skinny_gemm_triton(normed(x, norm), weight, None, bias, residual)
    return matmul_reference(normed(x, norm), weight, bias, residual)


def gated_matmul(
    x: Tensor, weight: Tensor, activation: ActivationKind, *, norm: RMSNorm | None = None
) -> Tensor:
    """Return act(gate) * up of norm(x), [rows, outs / 2]. weight: gate rows, then up rows."""
    match choose_kernel("dense", x, fits=supports_triton_gemm(x, weight)):
        case Kernel.GEMV:
            return gemv_triton(x, weight, activation=activation, norm=norm)
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
