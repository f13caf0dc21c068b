"""Matrix products with FP8 (e4m3) weights and one scale per output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.fp8_rows import Fp8Rows, quantize_rows_fp8
from localgen.backends.cuda.kernels.gemm.dense import linear, supports_triton_gemm
from localgen.backends.cuda.kernels.gemm.skinny_gemm import skinny_gemm_triton, skinny_gemm_variant
from localgen.backends.cuda.kernels.launch import Variant

# torch._scaled_mm needs a multiple of this number of outputs
_OUTPUT_MULTIPLE = 16


def fp8_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ (weight * scale).T + bias, [rows, outs] in x's dtype, accumulated in float32.

    x: [rows, ins]. weight: float8_e4m3fn [outs, ins]. scale: float32 [outs]. bias: [outs]. With few
    rows, x keeps its precision; with more, it is quantized to FP8: see `dispatch`. Below compute
    capability 8.9, torch dequantizes the weight on every call.
    """
    match choose_fp8_kernel(x, weight):
        case Kernel.FP8_GEMM:
            return skinny_gemm_triton(x, weight, scale, bias)
        case Kernel.FP8_SCALED_MM:
            return fp8_rows_matmul(quantize_rows_fp8(x), weight, scale, bias)
    return fp8_matmul_reference(x, weight, scale, bias)


def choose_fp8_kernel(x: Tensor, weight: Tensor) -> Kernel:
    """Return the kernel of `fp8_matmul`. x: any tensor with the device, dtype and rows."""
    unfit = (Kernel.FP8_SCALED_MM,) if weight.shape[0] % _OUTPUT_MULTIPLE else ()
    return choose_kernel("fp8", x, fits=supports_triton_gemm(x, weight), unfit=unfit)


def fp8_matmul_reference(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """PyTorch reference of `fp8_matmul`; the dequantized weight is rounded to x's dtype."""
    return linear(x, dequantize_fp8(weight, scale, x.dtype), bias)


def dequantize_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weight * scale, [outs, ins] in dtype."""
    # FP8 converts exactly to float32 and to float64
    exact = weight.double() if dtype is torch.float64 else weight.float()
    return (exact * scale[:, None].to(exact.dtype)).to(dtype)


def fp8_rows_matmul(
    x: Fp8Rows,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    fast_accum: bool = False,
) -> Tensor:
    """Multiply on FP8 tensor cores, with one scale per row of x and of weight; [rows, outs].

    The product is rounded to bfloat16 before the bias is added. fast_accum: keep sums in the tensor
    cores, with 14 bits, instead of adding them up in float32; benchmarks.gpu measures both.
    """
    out = torch._scaled_mm(
        x.values,
        weight.T,
        scale_a=x.scales,
        scale_b=scale[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )
    return out.to(x.dtype) if bias is None else (out + bias).to(x.dtype)


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model by number of rows; one with a remainder."""
    for rows, ins, outs in (
        (1, 4096, 4096),
        (8, 4096, 28672),
        (16, 14336, 4096),
        (64, 4096, 6144),
        (64, 896, 4864),
    ):
        yield skinny_gemm_variant(rows, ins, outs, "*fp8e4nv", None)
