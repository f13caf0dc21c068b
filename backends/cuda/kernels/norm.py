"""RMSNorm (Zhang and Sennrich 2019), fused with the residual addition before it."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.dependent_launch import wait_for_previous_kernel
from localgen.backends.cuda.kernels.device import upcast
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.fp8_rows import (
    Fp8Rows,
    fp8_row_scale,
    quantize_rows_fp8_reference,
)
from localgen.backends.cuda.kernels.launch import Launcher, Variant, next_power_of_2

# one program holds a whole row in registers
MAX_SIZE = 16384


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """norm(x) * weight, for kernels that compute it on the way. weight: [size]."""

    weight: Tensor
    eps: float


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: bool, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual) * weight, x + residual), both [..., size] in x's dtype.

    offset: multiply by 1 + weight, as Gemma does. size: at most MAX_SIZE. Computed in float32.
    """
    has_kernel = choose_kernel("norm", x) is Kernel.RMS_NORM
    chosen = rms_norm_triton if has_kernel else rms_norm_reference
    return chosen(x, weight, eps, offset=offset, residual=residual)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, offset: bool, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """PyTorch reference of `rms_norm`."""
    summed = x if residual is None else (upcast(x) + upcast(residual)).to(x.dtype)
    normed = upcast(summed)
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    by = 1 + upcast(weight) if offset else upcast(weight)
    return (normed * by).to(x.dtype), summed


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, *, offset: bool, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Triton implementation of `rms_norm`: one launch, one program per row."""
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    return normed, _launch_rms_norm(x, weight, eps, offset, residual, normed, None)


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, *, offset: bool, residual: Tensor | None
) -> tuple[Fp8Rows, Tensor]:
    """`rms_norm` of x, [rows, size], with the normed rows rounded to FP8."""
    has_kernel = choose_kernel("norm", x) is Kernel.RMS_NORM
    chosen = rms_norm_fp8_triton if has_kernel else rms_norm_fp8_reference
    return chosen(x, weight, eps, offset=offset, residual=residual)


def rms_norm_fp8_reference(
    x: Tensor, weight: Tensor, eps: float, *, offset: bool, residual: Tensor | None
) -> tuple[Fp8Rows, Tensor]:
    """PyTorch reference of `rms_norm_fp8`."""
    normed, summed = rms_norm_reference(x, weight, eps, offset=offset, residual=residual)
    return quantize_rows_fp8_reference(normed), summed


def rms_norm_fp8_triton(
    x: Tensor, weight: Tensor, eps: float, *, offset: bool, residual: Tensor | None
) -> tuple[Fp8Rows, Tensor]:
    """Triton implementation of `rms_norm_fp8`, one launch."""
    normed = Fp8Rows.empty(x.shape[0], x.shape[1], x)
    summed = _launch_rms_norm(x, weight, eps, offset, residual, normed.values, normed.scales)
    return normed, summed


def _launch_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: bool,
    residual: Tensor | None,
    normed: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """Write normed, and scales if it is FP8. Return x + residual."""
    size = x.shape[-1]
    assert size <= MAX_SIZE, f"hidden size {size} exceeds the kernel's maximum of {MAX_SIZE}"
    x = x.contiguous()
    summed = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    _launcher(size, offset, residual is not None)(
        (x.numel() // size,),
        x,
        x if residual is None else residual.contiguous(),
        weight,
        normed,
        scales,
        summed,
        eps,
    )
    return summed


@cache
def _launcher(size: int, offset: bool, has_residual: bool) -> Launcher:
    block, num_warps = _block_and_warps(size)
    return Launcher(
        _rms_norm_kernel,
        size=size,
        offset=offset,
        has_residual=has_residual,
        block=block,
        num_warps=num_warps,
    )


def _block_and_warps(size: int) -> tuple[int, int]:
    """Return the elements and warps of a program: 16-byte loads per thread, at most 16 warps."""
    block = next_power_of_2(size)
    return block, min(max(block // 256, 1), 16)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    scales,
    summed,
    eps,
    size: tl.constexpr,
    offset: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr = False,
):
    wait_for_previous_kernel(pdl)
    start = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, block)
    inside = at < size
    by = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        values += tl.load(residual + start + at, mask=inside, other=0.0).to(tl.float32)
        # normalize the rounded sum: it is what the residual stream holds
        rounded = values.to(summed.dtype.element_ty)
        tl.store(summed + start + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if offset:
        by += 1.0
    scale = tl.rsqrt(tl.sum(values * values) / size + eps)
    found = values * scale * by
    if scales is not None:
        row_scale = fp8_row_scale(tl.max(tl.abs(found)))
        tl.store(scales + tl.program_id(0), row_scale)
        found /= row_scale
    tl.store(normed + start + at, found.to(normed.dtype.element_ty), mask=inside)


def variants() -> Iterator[Variant]:
    """Hidden sizes of real models, including one that is not a power of two."""
    for size, has_residual, offset in (
        (1024, True, False),
        (3584, True, True),
        (4096, False, False),
        (4096, True, False),
        (8192, True, False),
        (MAX_SIZE, True, True),
    ):
        yield _variant(size, has_residual, offset, fp8=False)
    for size in (4096, 5120, MAX_SIZE):
        yield _variant(size, has_residual=True, offset=False, fp8=True)


def _variant(size: int, has_residual: bool, offset: bool, *, fp8: bool) -> Variant:
    block, num_warps = _block_and_warps(size)
    constants: dict[str, Any] = {
        "size": size,
        "offset": offset,
        "has_residual": has_residual,
        "block": block,
    }
    if not fp8:
        constants["scales"] = None
    signature = {
        **dict.fromkeys(("x", "residual", "weight"), "*bf16"),
        "normed": "*fp8e4nv" if fp8 else "*bf16",
        "scales": "*fp32" if fp8 else "constexpr",
        "summed": "*bf16",
        "eps": "fp32",
    }
    return Variant(
        name=f"rms_norm-{size}-{'add' if has_residual else 'plain'}"
        + ("-offset" if offset else "")
        + ("-fp8" if fp8 else ""),
        kernel=_rms_norm_kernel,
        signature=signature | {name: "constexpr" for name in constants if name not in signature},
        constants=constants,
        num_warps=num_warps,
        min_arch=89 if fp8 else 80,
    )
