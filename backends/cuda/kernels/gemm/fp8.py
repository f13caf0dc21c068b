"""FP8 (e4m3) weights with a scale for each output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from localgen.backends.cuda.kernels.device import arch_of, has_kernels, wide
from localgen.backends.cuda.kernels.gemm.dense import fits, thin_triton, thin_variant
from localgen.backends.cuda.kernels.launch import Variant

# above, activations become FP8 too, with a scale for each row
MOST_ROWS = 64
LARGEST = 448.0


def fp8_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ (weight * scale).T + bias, [rows, outs] of x's dtype, summed in float32.

    x: [rows, ins]. weight: float8_e4m3fn [outs, ins]. scale: float32 [outs]. bias: [outs]. Up to
    MOST_ROWS the rows keep their precision; above, they are rounded to FP8 as well. Below compute
    capability 8.9 the weight is widened by torch at every call.
    """
    if not (has_kernels(x) and fits(x, weight) and _has_fp8(x.device)):
        return fp8_matmul_reference(x, weight, scale, bias)
    if x.shape[0] <= MOST_ROWS:
        return thin_triton(x, weight, scale, bias)
    return _both_small(x, weight, scale, bias)


def fp8_matmul_reference(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The same by torch, the weight rounded to x's dtype."""
    return functional.linear(x, widened(weight, scale, x.dtype), bias)


def widened(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """weight * scale, [outs, ins] of dtype."""
    # eight bits to float32 and to float64 are both exact
    exact = weight.double() if dtype is torch.float64 else weight.float()
    return (exact * scale[:, None].to(exact.dtype)).to(dtype)


def small_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as float8_e4m3fn [rows, ins] and float32 scales [rows, 1]."""
    exact = wide(x)
    scales = exact.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (exact / scales).to(torch.float8_e4m3fn), scales


def _has_fp8(device: torch.device) -> bool:
    return arch_of(device) >= 89


def _both_small(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Tensor cores on FP8, with a scale for each row of both; they give bfloat16."""
    small, scales = small_rows(x)
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
        yield thin_variant(rows, ins, outs, "*fp8e4nv", None)
