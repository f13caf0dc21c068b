"""Matrix products with FP8 (e4m3) weights and one scale per output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.device import can_use_triton, compute_capability, upcast
from localgen.backends.cuda.kernels.gemm.dense import (
    linear,
    skinny_gemm_triton,
    skinny_gemm_variant,
    supports_triton_gemm,
)
from localgen.backends.cuda.kernels.launch import Variant

# with more rows, activations are quantized to FP8 too, with one scale per row
MAX_WEIGHT_ONLY_ROWS = 64
FP8_MAX = 448.0


def fp8_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ (weight * scale).T + bias, [rows, outs] in x's dtype, accumulated in float32.

    x: [rows, ins]. weight: float8_e4m3fn [outs, ins]. scale: float32 [outs]. bias: [outs]. Up to
    MAX_WEIGHT_ONLY_ROWS rows, x keeps its precision; with more, it is quantized to FP8. Below
    compute capability 8.9, torch dequantizes the weight on every call.
    """
    if not (can_use_triton(x) and supports_triton_gemm(x, weight) and _supports_fp8(x.device)):
        return fp8_matmul_reference(x, weight, scale, bias)
    if x.shape[0] <= MAX_WEIGHT_ONLY_ROWS:
        return skinny_gemm_triton(x, weight, scale, bias)
    return _fp8_activations_matmul(x, weight, scale, bias)


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


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x to float8_e4m3fn, [rows, ins], with float32 scales, [rows, 1]."""
    scales = upcast(x.abs().amax(-1, keepdim=True)).clamp(min=1e-12) / FP8_MAX
    # the division converts x to float32 itself: one copy of that size instead of three
    return (x / scales).to(torch.float8_e4m3fn), scales


def _supports_fp8(device: torch.device) -> bool:
    return compute_capability(device) >= 89


def _fp8_activations_matmul(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply on FP8 tensor cores, with one scale per row of x and of weight.

    The product is rounded to bfloat16 before the bias is added.
    """
    small, scales = quantize_rows_fp8(x)
    out = torch._scaled_mm(
        small, weight.T, scale_a=scales, scale_b=scale[None, :], out_dtype=torch.bfloat16
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
