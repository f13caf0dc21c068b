"""Gated MLP activation: act(gate) * up (Shazeer 2020)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from localgen.backends.cuda.kernels.device import upcast
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch

# each thread loads 16 bytes
_BLOCK, _WARPS = 1024, 4


def gated_activation(x: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """Return act(gate) * up, [rows, size], computed in float32.

    x: [rows, 2 * size], gate then up.
    """
    return (
        gated_activation_triton(x, activation)
        if choose_kernel("activation", x) is Kernel.GATED_ACTIVATION
        else gated_activation_reference(x, activation)
    )


def gated_activation_reference(x: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """PyTorch reference of `gated_activation`."""
    gate, up = upcast(x).chunk(2, -1)
    acted = (
        functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    )
    return (acted * up).to(x.dtype)


def gated_activation_triton(x: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """Triton implementation of `gated_activation`, one launch."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    grid = (rows, ceil_div(size, _BLOCK))
    launch(_gated_activation_kernel, grid)(
        x.contiguous(), out, size=size, activation=activation, block=_BLOCK, num_warps=_WARPS
    )
    return out


@triton.jit
def apply_activation(gate, activation: tl.constexpr):
    """Return silu or gelu_tanh of gate, float32."""
    bent = gate
    if activation == "gelu_tanh":
        # (1 + tanh y) / 2 is sigmoid(2 y)
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(bent)


@triton.jit
def _gated_activation_kernel(
    x, out, size: tl.constexpr, activation: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    gate = tl.load(x + row * (2 * size) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * size) + size + at, mask=inside, other=0.0).to(tl.float32)
    acted = apply_activation(gate, activation)
    tl.store(out + row * size + at, (acted * up).to(out.dtype.element_ty), mask=inside)


def variants() -> Iterator[Variant]:
    """Both activations, at the sizes of an 8B model and of small MoE experts."""
    for size, kind in ((768, "silu"), (14336, "silu"), (14336, "gelu_tanh"), (8960, "silu")):
        yield Variant(
            name=f"gated_activation-{size}-{kind}",
            kernel=_gated_activation_kernel,
            signature={
                "x": "*bf16",
                "out": "*bf16",
                **dict.fromkeys(("size", "activation", "block"), "constexpr"),
            },
            constants={"size": size, "activation": kind, "block": _BLOCK},
            num_warps=_WARPS,
        )
