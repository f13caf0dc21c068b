"""FP8 (e4m3) weights with a scale for each output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from localgen.backends.cuda.kernels.device import can_use_triton, compute_capability, upcast
from localgen.backends.cuda.kernels.gemm.dense import (
    skinny_gemm_triton,
    skinny_gemm_variant,
    supports_triton_gemm,
)
from localgen.backends.cuda.kernels.launch import Variant

# above, activations become FP8 too, with a scale for each row
MAX_WEIGHT_ONLY_ROWS = 64
FP8_MAX = 448.0


def fp8_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ (weight * scale).T + bias, [rows, outs] of x's dtype, summed in float32.

    x: [rows, ins]. weight: float8_e4m3fn [outs, ins]. scale: float32 [outs]. bias: [outs]. Up to
    MAX_WEIGHT_ONLY_ROWS the rows keep their precision; above, they are rounded to FP8 as well.
    Below compute capability 8.9 the weight is widened by torch at every call.
    """
    if not (can_use_triton(x) and supports_triton_gemm(x, weight) and _supports_fp8(x.device)):
        return fp8_matmul_reference(x, weight, scale, bias)
    if x.shape[0] <= MAX_WEIGHT_ONLY_ROWS:
        return skinny_gemm_triton(x, weight, scale, bias)
    return _fp8_activations_matmul(x, weight, scale, bias)


def fp8_matmul_reference(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The same by torch, the weight rounded to x's dtype."""
    return functional.linear(x, dequantize_fp8(weight, scale, x.dtype), bias)


def dequantize_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """weight * scale, [outs, ins] of dtype."""
    # eight bits to float32 and to float64 are both exact
    exact = weight.double() if dtype is torch.float64 else weight.float()
    return (exact * scale[:, None].to(exact.dtype)).to(dtype)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as float8_e4m3fn [rows, ins] and float32 scales [rows, 1]."""
    exact = upcast(x)
    scales = exact.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (exact / scales).to(torch.float8_e4m3fn), scales


def _supports_fp8(device: torch.device) -> bool:
    return compute_capability(device) >= 89


def _fp8_activations_matmul(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Tensor cores on FP8, with a scale for each row of both; they give bfloat16."""
    small, scales = quantize_rows_fp8(x)
    out = torch._scaled_mm(
        small, weight.T, scale_a=scales, scale_b=scale[None, :], out_dtype=torch.bfloat16
    )
    return out.to(x.dtype) if bias is None else (out + bias).to(x.dtype)


def variants() -> Iterator[Variant]:
    """The sizes of an 8B, by rows; one with a rest."""
    for rows, ins, outs in (
        (1, 4096, 4096),
        (8, 4096, 28672),
        (16, 14336, 4096),
        (64, 4096, 6144),
        (64, 896, 4864),
    ):
        yield skinny_gemm_variant(rows, ins, outs, "*fp8e4nv", None)
