"""A tile of a product: its size, the weight rows it is of, and what is done with its sums."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.device import has_kernels

Kind = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: outputs at once, inputs of each warp at once, rows padded to.

    registers: most of a thread; None: as the compiler has it.
    """

    outputs: int
    inputs: int
    rows: int
    warps: int
    stages: int = 1
    registers: int | None = None


def dot_type(x: Tensor) -> Any:
    """Triton's type of what tl.dot multiplies: x's own, but exact in the interpreter."""
    if not has_kernels(x):
        return tl.float32
    return tl.bfloat16 if x.dtype is torch.bfloat16 else tl.float16


@triton.jit
def as_operand(x, kind: tl.constexpr):
    """x, of 8 bits or more, as the type that tl.dot multiplies."""
    if x.dtype == tl.float8e4nv and kind == tl.bfloat16:
        # exact in float16; Triton 3.6 has no direct way to bfloat16 on sm_89
        x = x.to(tl.float16).to(tl.float32)
    return x.to(kind)


@triton.jit
def acted(gate, kind: tl.constexpr):
    """silu or gelu_tanh of float32."""
    bent = gate
    if kind == "gelu_tanh":
        # (1 + tanh y) / 2 is sigmoid(2 y)
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(bent)


@triton.jit
def output_ids(block, outs, outputs: tl.constexpr, paired: tl.constexpr):
    """Weight rows of a program. paired: gate, up, gate, up, ...; outs counts pairs then."""
    at = tl.arange(0, outputs)
    if paired:
        of = block * (outputs // 2) + at // 2
        return tl.minimum(of, outs - 1) + (at % 2) * outs
    return tl.minimum(block * outputs + at, outs - 1)


@triton.jit
def finish(summed, scale, bias, residual, out, block, own, row, rows, outs, kind: tl.constexpr):
    """Scale, gate, add and store sums [outputs, padded rows] of the weight rows `own`."""
    outputs: tl.constexpr = summed.shape[0]
    if scale is not None:
        summed *= tl.load(scale + own)[:, None]
    if kind is not None:
        paired = tl.reshape(summed, [outputs // 2, 2, summed.shape[1]])
        gate, up = tl.split(tl.permute(paired, [0, 2, 1]))
        to = block * (outputs // 2) + tl.arange(0, outputs // 2)
        store(acted(gate, kind) * up, out, row, rows, to, outs)
    else:
        to = block * outputs + tl.arange(0, outputs)
        if bias is not None:
            summed += tl.load(bias + to, mask=to < outs, other=0.0).to(tl.float32)[:, None]
        if residual is not None:
            at = row.to(tl.int64)[None, :] * outs + to[:, None]
            inside = (row < rows)[None, :] & (to < outs)[:, None]
            summed += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        store(summed, out, row, rows, to, outs)


@triton.jit
def store(values, out, row, rows, to, outs):
    """values: [outputs, rows] -> out: [rows, outs]."""
    at = row.to(tl.int64)[None, :] * outs + to[:, None]
    inside = (row < rows)[None, :] & (to < outs)[:, None]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)
