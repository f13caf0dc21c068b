"""Products of a few rows with a weight: a step reads every weight once, and little else.

One row: each thread keeps a part of the sum of a few outputs. More rows: `thin`, tensor cores with
the weight as the tall operand, so that the rows are padded to 8 and not to 16. In both the warps of
a program split the inputs and are summed in their order at the end: no workspace, no second
launch, the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from localgen.backends.cuda.kernels.activation import gated_reference
from localgen.backends.cuda.kernels.device import has_kernels
from localgen.backends.cuda.kernels.gemm.tile import (
    Kind,
    Tile,
    as_operand,
    dot_type,
    finish,
    output_ids,
)
from localgen.backends.cuda.kernels.launch import Variant, launch

# above, cuBLAS
MOST_ROWS = 8
# inputs must be a multiple, for loads of 16 bytes
INPUTS = 16


def one_row_tile(ins: int, outs: int) -> Tile:
    """For a single row. 4.3 TB/s at about 1 µs of latency are 33 KB in flight on each of 132 SMs.

    A program of 4 outputs x 16 bytes x 128 threads has 8 KB in flight; at 48 to 56 registers 9 or
    10 of them fit on an SM: 72 KB. Small weights are cut finer, to have programs for every SM.
    """
    return Tile(4 if outs >= 2048 else 2, 256, 1, 4 if ins > 1024 else 2)


def thin_tile(rows: int, outs: int, item_bytes: int) -> Tile:
    """For 2 rows and more; above 32 rows several programs read the same weights, out of the L2.

    In flight are stages - 2 tiles or one more: at 4096 outputs 256 programs of 2 x 16 KB in bf16
    or 4 x 8 KB in FP8, 62 KB an SM; at 28672 896 programs, 4 on an SM, twice that. All fit in
    99 KB of shared memory, with the rows.
    """
    padded = 8 if rows <= 8 else 16 if rows <= 16 else 32
    stages = 6 if padded * item_bytes == 8 else 4
    wide = padded > 8 or outs > 8192
    return Tile(32, 64, padded, 4, stages) if wide else Tile(16, 64, padded, 8, stages)


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias + residual, [rows, outs] of x's dtype, summed in float32.

    x: [rows, ins]. weight: [outs, ins], of the same dtype. bias: [outs]. residual: [rows, outs].
    """
    if has_kernels(x) and fits(x, weight) and x.shape[0] <= MOST_ROWS:
        return matmul_triton(x, weight, bias, residual)
    return matmul_reference(x, weight, bias, residual)


def gated_matmul(x: Tensor, weight: Tensor, kind: Kind) -> Tensor:
    """act(gate) * up, [rows, outs / 2]. weight: [outs, ins], all of gate, then all of up."""
    if has_kernels(x) and fits(x, weight) and x.shape[0] <= MOST_ROWS:
        return matmul_triton(x, weight, kind=kind)
    return gated_matmul_reference(x, weight, kind)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can take these: 16 bits an element, whole loads."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[0] > 0
        and weight.shape[1] % INPUTS == 0
        and weight.is_contiguous()
    )


def matmul_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The same by torch, which is cuBLAS on a GPU."""
    out = functional.linear(x, weight, bias)
    return out if residual is None else out + residual


def gated_matmul_reference(x: Tensor, weight: Tensor, kind: Kind) -> Tensor:
    """The same in plain torch."""
    return gated_reference(functional.linear(x, weight), kind)


def matmul_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: Kind | None = None,
) -> Tensor:
    """Both of them in one launch."""
    if x.shape[0] > 1:
        return thin_triton(x, weight, None, bias, residual, kind=kind)
    (outs, ins), x = weight.shape, x.contiguous()
    outs = outs if kind is None else outs // 2
    tile = one_row_tile(ins, weight.shape[0])
    out = torch.empty((1, outs), dtype=x.dtype, device=x.device)
    step = tile.inputs * tile.warps
    launch(_one_row, (triton.cdiv(weight.shape[0], tile.outputs),))(
        x,
        weight,
        bias,
        None if residual is None else residual.contiguous(),
        out,
        ins // INPUTS,
        outs,
        kind=kind,
        outputs=tile.outputs,
        step=step,
        even=ins % step == 0,
        num_warps=tile.warps,
    )
    return out


def thin_triton(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: Kind | None = None,
) -> Tensor:
    """matmul or gated_matmul of up to about 64 rows. weight: x's dtype or float8_e4m3fn.

    scale: float32 [outs], of each output of the weight, or None.
    """
    rows, (outs, ins) = x.shape[0], weight.shape
    tile = thin_tile(rows, outs, weight.element_size())
    outs = outs if kind is None else outs // 2
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    # programs over the same weights follow one another, and find them in the L2
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(weight.shape[0], tile.outputs))
    launch(_thin, grid)(
        x.contiguous(),
        weight,
        scale,
        bias,
        None if residual is None else residual.contiguous(),
        out,
        rows,
        ins // INPUTS,
        outs,
        dot=dot_type(x),
        kind=kind,
        outputs=tile.outputs,
        inputs=tile.inputs,
        padded=tile.rows,
        warps=tile.warps,
        stages=tile.stages,
        even=ins % (tile.inputs * tile.warps) == 0,
        num_warps=tile.warps,
    )
    return out


@triton.jit
def added(total, x, weight, own, ins, step: tl.constexpr, even: tl.constexpr):
    """total, float32 [outputs, step / 4], and what a row x [ins] adds to it.

    Every thread has 8 inputs of each step, so that x and the weight lie alike; a sum of four
    of them before the sum over steps halves the registers.
    """
    outputs: tl.constexpr = own.shape[0]
    at = tl.arange(0, step)
    w_at = weight + own.to(tl.int64)[:, None] * ins + at[None, :]
    for k in range(0, ins, step):
        if even:
            w = tl.load(w_at + k, eviction_policy="evict_first")
            a = tl.load(x + k + at)
        else:
            inside = at < ins - k
            w = tl.load(w_at + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            a = tl.load(x + k + at, mask=inside, other=0.0)
        products = w.to(tl.float32) * a.to(tl.float32)[None, :]
        total += tl.sum(tl.reshape(products, [outputs, step // 4, 4]), 2)
    return total


@triton.jit
def _one_row(
    x,
    weight,
    bias,
    residual,
    out,
    ins_16,
    outs,
    kind: tl.constexpr,
    outputs: tl.constexpr,
    step: tl.constexpr,
    even: tl.constexpr,
):
    block = tl.program_id(0)
    own = output_ids(block, outs, outputs, kind is not None)
    total = tl.zeros([outputs, step // 4], tl.float32)
    total = added(total, x, weight, own, ins_16 * 16, step, even)
    row = tl.arange(0, 1)
    finish(tl.sum(total, 1)[:, None], None, bias, residual, out, block, own, row, 1, outs, kind)


@triton.jit(do_not_specialize=["rows"])
def _thin(
    x,
    weight,
    scale,
    bias,
    residual,
    out,
    rows,
    ins_16,
    outs,
    dot: tl.constexpr,
    kind: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    padded: tl.constexpr,
    warps: tl.constexpr,
    stages: tl.constexpr,
    even: tl.constexpr,
):
    """A dot for each warp, [warps, outputs, inputs] @ [warps, inputs, padded rows]."""
    ins = ins_16 * 16
    block = tl.program_id(1)
    row = tl.program_id(0) * padded + tl.arange(0, padded)
    own = output_ids(block, outs, outputs, kind is not None)
    first = tl.arange(0, warps)[:, None, None] * inputs
    w_k = first + tl.arange(0, inputs)[None, None, :]
    x_k = first + tl.arange(0, inputs)[None, :, None]
    w_at = weight + own.to(tl.int64)[None, :, None] * ins + w_k
    x_at = x + row.to(tl.int64)[None, None, :] * ins + x_k
    given = (row < rows)[None, None, :]
    total = tl.zeros([warps, outputs, padded], tl.float32)
    for k in tl.range(0, ins, warps * inputs, num_stages=stages):
        if even:
            w = tl.load(w_at + k, eviction_policy="evict_first")
            a = tl.load(x_at + k, mask=given, other=0.0)
        else:
            w = tl.load(w_at + k, mask=w_k < ins - k, other=0.0, eviction_policy="evict_first")
            a = tl.load(x_at + k, mask=given & (x_k < ins - k), other=0.0)
        total = tl.dot(as_operand(w, dot), a.to(dot), total, input_precision="ieee")
    finish(tl.sum(total, 0), scale, bias, residual, out, block, own, row, rows, outs, kind)


def variants() -> Iterator[Variant]:
    """Of an 8B, its logits, a small mixture's experts and a gate; whole and with a rest."""
    shapes: tuple[tuple[int, int, Kind | None], ...] = (
        (4096, 6144, None),
        (4096, 28672, "silu"),
        (3584, 4608, None),
        (2048, 128, None),
        (896, 4864, "gelu_tanh"),
        (512, 1024, None),
    )
    for ins, outs, kind in shapes:
        yield _one_row_variant(ins, outs, kind)
    yield thin_variant(8, 4096, 6144, "*bf16", None)
    yield thin_variant(8, 4096, 28672, "*bf16", "silu")
    yield thin_variant(8, 896, 4864, "*bf16", "gelu_tanh")
    yield thin_variant(2, 4096, 4096, "*fp16", None)


def _one_row_variant(ins: int, outs: int, kind: Kind | None) -> Variant:
    tile = one_row_tile(ins, outs)
    step = tile.inputs * tile.warps
    constants = {
        "kind": kind,
        "outputs": tile.outputs,
        "step": step,
        "even": ins % step == 0,
    }
    pointers = dict.fromkeys(("x", "weight", "bias", "residual", "out"), "*bf16")
    return Variant(
        name=f"one-row-{ins}-{outs}-{kind}",
        kernel=_one_row,
        signature=pointers
        | {"ins_16": "i32", "outs": "i32"}
        | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        num_warps=tile.warps,
    )


def thin_variant(rows: int, ins: int, outs: int, weight: str, kind: Kind | None) -> Variant:
    """As thin_triton launches it. weight: its Triton pointer type."""
    small = weight == "*fp8e4nv"
    tile = thin_tile(rows, outs, 1 if small else 2)
    pointer = "*bf16" if small else weight
    constants: dict[str, Any] = {
        "dot": tl.float16 if pointer == "*fp16" else tl.bfloat16,
        "kind": kind,
        "outputs": tile.outputs,
        "inputs": tile.inputs,
        "padded": tile.rows,
        "warps": tile.warps,
        "stages": tile.stages,
        "even": ins % (tile.inputs * tile.warps) == 0,
    }
    if not small:
        constants["scale"] = None
    signature = {
        "x": pointer,
        "weight": weight,
        "scale": "*fp32" if small else "constexpr",
        **dict.fromkeys(("bias", "residual", "out"), pointer),
        **dict.fromkeys(("rows", "ins_16", "outs"), "i32"),
    }
    return Variant(
        name=f"thin-{weight}-{rows}-{ins}-{outs}-{kind}",
        kernel=_thin,
        signature=signature | {name: "constexpr" for name in constants if name not in signature},
        constants=constants,
        num_warps=tile.warps,
        min_arch=89 if small else 80,
    )
