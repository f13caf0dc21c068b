"""Rows of inputs rounded to FP8 (e4m3), each with a scale, for products on FP8 tensor cores.

Rounded where the row is computed, in the norm or the activation; otherwise by a launch of its own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.activation import apply_activation, gated_activation_reference
from localgen.backends.cuda.kernels.device import upcast
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.launch import Variant, launch

ActivationKind = Literal["silu", "gelu_tanh"]
FP8_MAX = 448.0
_BLOCK, _WARPS = 4096, 8


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Rows:
    """Rows, values * scales. dtype: of the exact rows, and of the products with them.

    values: float8_e4m3fn [rows, size]. scales: float32 [rows, 1].
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, rows: int, size: int, like: Tensor) -> Fp8Rows:
        """Uninitialized, with the device and dtype of `like`."""
        values = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=like.device)
        scales = torch.empty((rows, 1), dtype=torch.float32, device=like.device)
        return cls(values, scales, like.dtype)


def quantize_rows_fp8(x: Tensor, activation: ActivationKind | None = None) -> Fp8Rows:
    """Round x, [rows, size], or act(gate) * up, x being gate and up: [rows, 2 * size].

    On a GPU of compute capability 8.9 or newer.
    """
    has_kernel = choose_kernel("fp8_rows", x) is Kernel.QUANTIZE_ROWS
    chosen = quantize_rows_fp8_triton if has_kernel else quantize_rows_fp8_reference
    return chosen(x, activation)


def quantize_rows_fp8_reference(x: Tensor, activation: ActivationKind | None = None) -> Fp8Rows:
    """PyTorch reference of `quantize_rows_fp8`."""
    exact = upcast(x) if activation is None else gated_activation_reference(upcast(x), activation)
    scales = exact.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return Fp8Rows((exact / scales).to(torch.float8_e4m3fn), scales, x.dtype)


def quantize_rows_fp8_triton(x: Tensor, activation: ActivationKind | None = None) -> Fp8Rows:
    """Triton implementation of `quantize_rows_fp8`: one launch, one program per row."""
    rows, size = x.shape[0], x.shape[1] // (1 if activation is None else 2)
    out = Fp8Rows.empty(rows, size, x)
    launch(_quantize_rows_kernel, (rows,))(
        x.contiguous(),
        out.values,
        out.scales,
        size=size,
        activation=activation,
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def fp8_row_scale(largest):
    """Return the scale of a row by its largest magnitude."""
    return tl.maximum(largest, 1e-12) / 448.0


@triton.jit
def _load_row(x, at, size: tl.constexpr, activation: tl.constexpr):
    values = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    if activation is not None:
        up = tl.load(x + size + at, mask=at < size, other=0.0).to(tl.float32)
        values = apply_activation(values, activation) * up
    return values


@triton.jit
def _quantize_rows_kernel(
    x, values, scales, size: tl.constexpr, activation: tl.constexpr, block: tl.constexpr
):
    """Compute the row twice: for its largest magnitude, then again, from cache, to round it."""
    row = tl.program_id(0).to(tl.int64)
    x += row * (size if activation is None else 2 * size)
    at = tl.arange(0, block)
    largest = tl.zeros([block], tl.float32)
    for start in range(0, size, block):
        largest = tl.maximum(largest, tl.abs(_load_row(x, start + at, size, activation)))
    scale = fp8_row_scale(tl.max(largest))
    tl.store(scales + row, scale)
    for start in range(0, size, block):
        found = _load_row(x, start + at, size, activation) / scale
        to = values + row * size + start + at
        tl.store(to, found.to(values.dtype.element_ty), mask=start + at < size)


def variants() -> Iterator[Variant]:
    """Rows of an 8B model, and of its MLP; one that is no multiple of a block."""
    shapes: tuple[tuple[int, ActivationKind | None], ...] = (
        (4096, None),
        (8960, None),
        (14336, "silu"),
        (768, "gelu_tanh"),
    )
    for size, activation in shapes:
        yield Variant(
            name=f"quantize-rows-{size}-{activation}",
            kernel=_quantize_rows_kernel,
            signature={
                "x": "*bf16",
                "values": "*fp8e4nv",
                "scales": "*fp32",
                **dict.fromkeys(("size", "activation", "block"), "constexpr"),
            },
            constants={"size": size, "activation": activation, "block": _BLOCK},
            num_warps=_WARPS,
            min_arch=89,
        )
