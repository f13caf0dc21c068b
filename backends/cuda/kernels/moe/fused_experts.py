"""Mixture-of-experts layer: each row is computed by its top-k experts.

A slot is one (row, expert) pair. Few rows: one program per slot and block of outputs, like a GEMV.
More rows: see grouped_experts.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.activation import gated_activation_reference
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.gemm.dense import linear
from localgen.backends.cuda.kernels.gemm.gemv import accumulate_gemv, choose_gemv_tile
from localgen.backends.cuda.kernels.gemm.tile import (
    INPUT_MULTIPLE,
    ActivationKind,
    GemmTile,
    dot_dtype,
    gemm_epilogue,
    weight_row_ids,
)
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch, next_power_of_2
from localgen.backends.cuda.kernels.moe.grouped_experts import ExpertRouting, grouped_experts_triton

# experts per row that one program can compute, one per warp
_MAX_SMALL_BATCH_TOP_K = 8


def fused_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, routing: ExpertRouting, activation: ActivationKind
) -> Tensor:
    """Return the sum of the top-k experts' outputs, weighted by topk_weights, [rows, hidden].

    x: [rows, hidden]. gate_up: [experts, 2 * inner, hidden], gate rows, then up rows. down:
    [experts, hidden, inner].
    """
    whole = gate_up.shape[2] % INPUT_MULTIPLE == 0 and down.shape[2] % INPUT_MULTIPLE == 0
    many = routing.topk_ids.shape[1] > _MAX_SMALL_BATCH_TOP_K
    unfit = (Kernel.SMALL_BATCH_EXPERTS,) if many else ()
    match choose_kernel("experts", x, fits=whole, unfit=unfit):
        case Kernel.SMALL_BATCH_EXPERTS:
            return small_batch_experts_triton(x, gate_up, down, routing, activation)
        case Kernel.GROUPED_EXPERTS:
            return grouped_experts_triton(x, gate_up, down, routing, activation)
    return fused_experts_reference(x, gate_up, down, routing, activation)


def fused_experts_reference(
    x: Tensor, gate_up: Tensor, down: Tensor, routing: ExpertRouting, activation: ActivationKind
) -> Tensor:
    """PyTorch reference of `fused_experts`, one expert at a time."""
    out = torch.zeros_like(x)
    for expert in sorted(set(routing.topk_ids.flatten().tolist())):
        rows, place = (routing.topk_ids == expert).nonzero(as_tuple=True)
        inner = gated_activation_reference(linear(x[rows], gate_up[expert]), activation)
        answer = linear(inner, down[expert])
        out.index_add_(0, rows, answer * routing.topk_weights[rows, place, None].to(x.dtype))
    return out


def small_batch_experts_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, routing: ExpertRouting, activation: ActivationKind
) -> Tensor:
    """Triton implementation of `fused_experts` for few rows, two launches."""
    (rows, hidden), top_k = x.shape, routing.topk_ids.shape[1]
    slots, inner_size = routing.topk_ids.numel(), down.shape[2]
    x, ids, shares = (
        x.contiguous(),
        routing.topk_ids.contiguous(),
        routing.topk_weights.contiguous(),
    )
    inner = torch.empty((slots, inner_size), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    tile = choose_gemv_tile(hidden, 2 * inner_size)
    step = tile.inputs * tile.num_warps
    launch(_small_batch_gate_up_kernel, (ceil_div(2 * inner_size, tile.outputs), slots))(
        x,
        gate_up,
        ids,
        inner,
        hidden // INPUT_MULTIPLE,
        inner_size,
        top_k,
        activation=activation,
        outputs=tile.outputs,
        step=step,
        even=hidden % step == 0,
        num_warps=tile.num_warps,
    )
    tile, splits = _choose_down_tile(top_k)
    launch(_small_batch_down_kernel, (ceil_div(hidden, tile.outputs), rows))(
        inner,
        down,
        ids,
        shares,
        out,
        inner_size // INPUT_MULTIPLE,
        hidden,
        dot_dtype=dot_dtype(x),
        top_k=top_k,
        outputs=tile.outputs,
        inputs=tile.inputs,
        warps=tile.num_warps,
        splits=splits,
        stages=tile.num_stages,
        even=inner_size % (splits * tile.inputs) == 0,
        num_warps=tile.num_warps,
    )
    return out


def _choose_down_tile(top_k: int) -> tuple[GemmTile, int]:
    """Return the tile and the number of warps per expert; 2 or 3 x 16 KB per program in flight."""
    return GemmTile(16, 64, 8, 8, 4), 8 // next_power_of_2(top_k)


@triton.jit
def _small_batch_gate_up_kernel(
    x,
    weight,
    topk_ids,
    out,
    ins_16,
    outs,
    top_k,
    activation: tl.constexpr,
    outputs: tl.constexpr,
    step: tl.constexpr,
    even: tl.constexpr,
):
    ins = ins_16 * 16
    block, slot = tl.program_id(0), tl.program_id(1)
    own = weight_row_ids(block, outs, outputs, True)
    matrix = weight + tl.load(topk_ids + slot).to(tl.int64) * 2 * outs * ins
    one = x + slot // top_k * ins
    total, _ = accumulate_gemv(one, None, matrix, own, ins, step, even, False)
    summed = tl.sum(total, 1)[:, None]
    row = tl.arange(0, 1)
    gemm_epilogue(summed, None, None, None, out + slot * outs, block, own, row, 1, outs, activation)


@triton.jit
def _small_batch_down_kernel(
    x,
    weight,
    topk_ids,
    topk_weights,
    out,
    ins_16,
    outs,
    dot_dtype: tl.constexpr,
    top_k: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    warps: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    even: tl.constexpr,
):
    """Compute all experts of a row, `splits` warps per expert, and add their weighted sums.

    Like `_skinny_gemm_kernel`, but each warp has its own weight and one row, padded to 8.
    """
    ins = ins_16 * 16
    block, row = tl.program_id(0), tl.program_id(1)
    own = weight_row_ids(block, outs, outputs, False).to(tl.int64)
    warp = tl.arange(0, warps)
    chosen = warp // splits < top_k
    slot = row * top_k + tl.minimum(warp // splits, top_k - 1)
    matrix = weight + tl.load(topk_ids + slot).to(tl.int64) * outs * ins
    first = (warp % splits)[:, None, None] * inputs
    w_k = first + tl.arange(0, inputs)[None, None, :]
    x_k = first + tl.arange(0, inputs)[None, :, None]
    only = tl.arange(0, 8)
    given = chosen[:, None, None] & (only == 0)[None, None, :]
    w_at = matrix[:, None, None] + own[None, :, None] * ins + w_k
    x_at = x + slot[:, None, None] * ins + x_k + only[None, None, :] * 0
    total = tl.zeros([warps, outputs, 8], tl.float32)
    for k in tl.range(0, ins, splits * inputs, num_stages=stages):
        if even:
            w = tl.load(w_at + k, eviction_policy="evict_first")
            a = tl.load(x_at + k, mask=given, other=0.0)
        else:
            w = tl.load(w_at + k, mask=w_k < ins - k, other=0.0, eviction_policy="evict_first")
            a = tl.load(x_at + k, mask=given & (x_k < ins - k), other=0.0)
        total = tl.dot(w.to(dot_dtype), a.to(dot_dtype), total, input_precision="ieee")
    share = tl.load(topk_weights + slot, mask=chosen, other=0.0)
    summed = tl.sum(total * share[:, None, None], 0)
    gemm_epilogue(summed, None, None, None, out + row * outs, block, own, only, 1, outs, None)


def variants() -> Iterator[Variant]:
    """Shapes with 128 small experts, 8 large ones, and tiny ones with a remainder."""
    for inner, hidden, top_k in ((768, 2048, 8), (14336, 4096, 2), (48, 96, 3)):
        yield _gate_up_variant(inner, hidden)
        yield _down_variant(inner, top_k)


def _gate_up_variant(inner: int, hidden: int) -> Variant:
    tile = choose_gemv_tile(hidden, 2 * inner)
    step = tile.inputs * tile.num_warps
    constants = {
        "activation": "silu",
        "outputs": tile.outputs,
        "step": step,
        "even": hidden % step == 0,
    }
    pointers = {"x": "*bf16", "weight": "*bf16", "topk_ids": "*i64", "out": "*bf16"}
    numbers = dict.fromkeys(("ins_16", "outs", "top_k"), "i32")
    return Variant(
        name=f"small-batch-gate-up-{hidden}-{inner}",
        kernel=_small_batch_gate_up_kernel,
        signature={**pointers, **numbers, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        num_warps=tile.num_warps,
    )


def _down_variant(inner: int, top_k: int) -> Variant:
    tile, splits = _choose_down_tile(top_k)
    constants: dict[str, Any] = {
        "dot_dtype": tl.bfloat16,
        "top_k": top_k,
        "outputs": tile.outputs,
        "inputs": tile.inputs,
        "warps": tile.num_warps,
        "splits": splits,
        "stages": tile.num_stages,
        "even": inner % (splits * tile.inputs) == 0,
    }
    pointers = {
        "x": "*bf16",
        "weight": "*bf16",
        "topk_ids": "*i64",
        "topk_weights": "*fp32",
        "out": "*bf16",
    }
    numbers = dict.fromkeys(("ins_16", "outs"), "i32")
    return Variant(
        name=f"small-batch-down-{inner}-{top_k}",
        kernel=_small_batch_down_kernel,
        signature={**pointers, **numbers, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        num_warps=tile.num_warps,
    )
