"""Parts shared by the GEMM kernels: tile sizes, weight row indices and the epilogue."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.activation import apply_activation
from localgen.backends.cuda.kernels.device import can_use_triton

ActivationKind = Literal["silu", "gelu_tanh"]
# the number of inputs must be a multiple of this, for 16-byte loads
INPUT_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Tile of a program. outputs: outputs per program. inputs: inputs per warp and iteration.

    rows: padded number of rows. max_registers: limit per thread, or None for the compiler's choice.
    """

    outputs: int
    inputs: int
    rows: int
    num_warps: int
    num_stages: int = 1
    max_registers: int | None = None


def dot_dtype(x: Tensor) -> Any:
    """Return the Triton dtype of tl.dot's operands: x's dtype, or float32 in the interpreter."""
    if not can_use_triton(x):
        return tl.float32
    return tl.bfloat16 if x.dtype is torch.bfloat16 else tl.float16


@triton.jit
def cast_for_dot(x, dtype: tl.constexpr):
    """Cast x (8 bits or wider) to the operand dtype of tl.dot."""
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        # exact through float16; Triton 3.6 has no direct conversion to bfloat16 on sm_89
        x = x.to(tl.float16).to(tl.float32)
    return x.to(dtype)


@triton.jit
def weight_row_ids(block, num_outputs, outputs: tl.constexpr, paired: tl.constexpr):
    """Return the weight rows of a program, clamped to the last one.

    paired: rows alternate gate, up, gate, up, ...; num_outputs then counts pairs.
    """
    at = tl.arange(0, outputs)
    if paired:
        of = block * (outputs // 2) + at // 2
        return tl.minimum(of, num_outputs - 1) + (at % 2) * num_outputs
    return tl.minimum(block * outputs + at, num_outputs - 1)


@triton.jit
def gemm_epilogue(
    acc,
    scale,
    bias,
    residual,
    out,
    block,
    weight_rows,
    row,
    rows,
    num_outputs,
    activation: tl.constexpr,
):
    """Apply scale, activation, bias and residual to acc, [outputs, padded rows], and store it."""
    outputs: tl.constexpr = acc.shape[0]
    if scale is not None:
        acc *= tl.load(scale + weight_rows)[:, None]
    if activation is not None:
        paired = tl.reshape(acc, [outputs // 2, 2, acc.shape[1]])
        gate, up = tl.split(tl.permute(paired, [0, 2, 1]))
        to = block * (outputs // 2) + tl.arange(0, outputs // 2)
        store_transposed(apply_activation(gate, activation) * up, out, row, rows, to, num_outputs)
    else:
        to = block * outputs + tl.arange(0, outputs)
        if bias is not None:
            acc += tl.load(bias + to, mask=to < num_outputs, other=0.0).to(tl.float32)[:, None]
        if residual is not None:
            at = row.to(tl.int64)[None, :] * num_outputs + to[:, None]
            inside = (row < rows)[None, :] & (to < num_outputs)[:, None]
            acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        store_transposed(acc, out, row, rows, to, num_outputs)


@triton.jit
def store_transposed(values, out, row, rows, output_ids, num_outputs):
    """Store values, [outputs, rows], to out, [rows, outs]."""
    at = row.to(tl.int64)[None, :] * num_outputs + output_ids[:, None]
    inside = (row < rows)[None, :] & (output_ids < num_outputs)[:, None]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)
