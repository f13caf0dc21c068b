"""Mixture of experts for many rows: a grouped GEMM over slots sorted by expert.

A slot is one (row, expert) pair. Slots are sorted on the device, and each tile of the GEMM holds
slots of one expert. The kernel finds its tile itself, so no count is copied to the host. Sums have
a fixed order, so the result is deterministic.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.activation import apply_activation
from localgen.backends.cuda.kernels.gemm.tile import (
    INPUT_MULTIPLE,
    ActivationKind,
    dot_dtype,
    weight_row_ids,
)
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch, next_power_of_2

# slots per iteration of the sort kernel; elements per program of the weighted sum
_SORT_BLOCK, _SUM_BLOCK = 1024, 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRouting:
    """topk_ids: int64 [rows, top_k], expert ids. topk_weights: float32 [rows, top_k]."""

    topk_ids: Tensor
    topk_weights: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SlotsByExpert:
    """Slots sorted by expert.

    sorted_slots: int32 [slots]. slot_positions: int32 [slots], the position of each slot in
    sorted_slots. expert_offsets: int32 [experts + 1], first position of each expert.
    """

    sorted_slots: Tensor
    slot_positions: Tensor
    expert_offsets: Tensor


@dataclass(frozen=True, slots=True)
class GroupedGemmTile:
    """Tile of a program: slots x outputs, `inputs` per loop iteration."""

    slots: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def choose_grouped_gemm_tile(num_slots: int, num_experts: int) -> GroupedGemmTile:
    """Choose a tile by the mean number of slots per expert."""
    mean = num_slots / num_experts
    if mean <= 16:
        return GroupedGemmTile(16, 64, 128, 4, 4)
    return GroupedGemmTile(64, 128, 64, 4, 4) if mean <= 96 else GroupedGemmTile(128, 128, 64, 8, 3)


def grouped_experts_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, routing: ExpertRouting, activation: ActivationKind
) -> Tensor:
    """Triton implementation of `fused_experts.fused_experts` for many rows."""
    (rows, hidden), (experts, _, inner_size) = x.shape, down.shape
    dealt = sort_slots_by_expert_triton(routing.topk_ids, experts)
    inner = torch.empty((routing.topk_ids.numel(), inner_size), dtype=x.dtype, device=x.device)
    answers = torch.empty((len(inner), hidden), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    top_k = routing.topk_ids.shape[1]
    _grouped_gemm(x.contiguous(), gate_up, dealt, inner, dealt.sorted_slots, top_k, activation)
    _grouped_gemm(inner, down, dealt, answers, None, top_k, None)
    launch(_weighted_sum_kernel, (rows, ceil_div(hidden, _SUM_BLOCK)))(
        answers,
        dealt.slot_positions,
        routing.topk_weights.contiguous(),
        out,
        hidden,
        top_k=top_k,
        block=_SUM_BLOCK,
        num_warps=4,
    )
    return out


def sort_slots_by_expert_triton(topk_ids: Tensor, num_experts: int) -> SlotsByExpert:
    """Sort slots by expert; the sort is stable."""
    slots = topk_ids.numel()
    order, places = (
        torch.empty(slots, dtype=torch.int32, device=topk_ids.device) for _ in range(2)
    )
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    launch(_sort_slots_kernel, (num_experts,))(
        topk_ids.contiguous(),
        order,
        places,
        starts,
        slots,
        num_experts,
        block=_SORT_BLOCK,
        num_warps=4,
    )
    return SlotsByExpert(order, places, starts)


def _grouped_gemm(
    x: Tensor,
    weight: Tensor,
    slots_by_expert: SlotsByExpert,
    out: Tensor,
    sorted_slots: Tensor | None,
    top_k: int,
    activation: ActivationKind | None,
) -> None:
    """Write one row of out per position of slots_by_expert, computed with its expert's weight.

    The input of position p is row p of x or, with sorted_slots, the row of x that the slot at
    position p belongs to.
    """
    experts, outs, ins = weight.shape
    tile = choose_grouped_gemm_tile(len(out), experts)
    # every expert can have one partial tile
    tiles = len(out) // tile.slots + min(experts, len(out))
    across = ceil_div(outs, tile.outputs)
    launch(_grouped_gemm_kernel, (tiles * across,))(
        x,
        weight,
        sorted_slots,
        slots_by_expert.expert_offsets,
        out,
        ins // INPUT_MULTIPLE,
        out.shape[1] // INPUT_MULTIPLE,
        experts,
        top_k,
        tiles,
        across,
        dot_dtype=dot_dtype(x),
        activation=activation,
        padded_experts=next_power_of_2(experts),
        slots=tile.slots,
        outputs=tile.outputs,
        inputs=tile.inputs,
        stages=tile.num_stages,
        even=ins % tile.inputs == 0,
        num_warps=tile.num_warps,
    )


@triton.jit(do_not_specialize=["num_slots"])
def _sort_slots_kernel(
    topk_ids,
    sorted_slots,
    slot_positions,
    expert_offsets,
    num_slots,
    num_experts,
    block: tl.constexpr,
):
    """Stable counting sort; each program places the slots of one expert."""
    expert = tl.program_id(0)
    at = tl.arange(0, block)
    before = 0
    for first in range(0, num_slots, block):
        found = tl.load(topk_ids + first + at, mask=first + at < num_slots, other=num_experts)
        before += tl.sum((found < expert).to(tl.int32))
    tl.store(expert_offsets + expert, before)
    if expert == num_experts - 1:
        tl.store(expert_offsets + num_experts, num_slots)
    for first in range(0, num_slots, block):
        found = tl.load(topk_ids + first + at, mask=first + at < num_slots, other=num_experts)
        mine = (found == expert).to(tl.int32)
        place = before + tl.cumsum(mine) - 1
        tl.store(sorted_slots + place, first + at, mask=mine > 0)
        tl.store(slot_positions + first + at, place, mask=mine > 0)
        before += tl.sum(mine)


@triton.jit
def _weighted_sum_kernel(
    expert_outputs,
    slot_positions,
    topk_weights,
    out,
    size,
    top_k: tl.constexpr,
    block: tl.constexpr,
):
    """Sum the outputs of a row's slots, weighted by topk_weights, in slot order."""
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for i in tl.static_range(top_k):
        place = tl.load(slot_positions + row * top_k + i).to(tl.int64)
        share = tl.load(topk_weights + row * top_k + i)
        total += share * tl.load(expert_outputs + place * size + at, mask=at < size, other=0.0)
    tl.store(out + row.to(tl.int64) * size + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["num_slot_tiles"])
def _grouped_gemm_kernel(
    x,
    weight,
    sorted_slots,
    expert_offsets,
    out,
    ins_16,
    outs_16,
    num_experts,
    top_k,
    num_slot_tiles,
    num_output_tiles,
    dot_dtype: tl.constexpr,
    activation: tl.constexpr,
    padded_experts: tl.constexpr,
    slots: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    stages: tl.constexpr,
    even: tl.constexpr,
):
    """One tile of one expert: [slots, inputs] @ [inputs, outputs], looping over inputs."""
    ins, outs = ins_16 * 16, outs_16 * 16
    # bands of 8 slot tiles run together, to share weight reads through L2
    band = tl.program_id(0) // (8 * num_output_tiles)
    height = tl.minimum(num_slot_tiles - band * 8, 8)
    inside_band = tl.program_id(0) % (8 * num_output_tiles)
    tile, block = band * 8 + inside_band % height, inside_band // height

    lane = tl.arange(0, padded_experts)
    start = tl.load(expert_offsets + lane, mask=lane < num_experts, other=0)
    end = tl.load(expert_offsets + lane + 1, mask=lane < num_experts, other=0)
    ends = tl.cumsum((end - start + slots - 1) // slots)
    expert = tl.sum((ends <= tile).to(tl.int32))
    if expert >= num_experts:
        return
    tile -= tl.max(tl.where(ends <= tile, ends, 0))
    place = tl.load(expert_offsets + expert) + tile * slots + tl.arange(0, slots)
    given = place < tl.load(expert_offsets + expert + 1)
    row = place
    if sorted_slots is not None:
        row = tl.load(sorted_slots + place, mask=given, other=0) // top_k

    paired: tl.constexpr = activation is not None
    own = weight_row_ids(block, outs, outputs, paired).to(tl.int64)
    matrix = weight + expert.to(tl.int64) * (outs * (2 if paired else 1)) * ins
    k = tl.arange(0, inputs)
    x_at = x + row.to(tl.int64)[:, None] * ins + k[None, :]
    w_at = matrix + own[None, :] * ins + k[:, None]
    total = tl.zeros([slots, outputs], tl.float32)
    for done in tl.range(0, ins, inputs, num_stages=stages):
        if even:
            a = tl.load(x_at + done, mask=given[:, None], other=0.0)
            w = tl.load(w_at + done)
        else:
            inside = k < ins - done
            a = tl.load(x_at + done, mask=given[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at + done, mask=inside[:, None], other=0.0)
        total = tl.dot(a.to(dot_dtype), w.to(dot_dtype), total, input_precision="ieee")
    if activation is not None:
        gate, up = tl.split(tl.reshape(total, [slots, outputs // 2, 2]))
        total = apply_activation(gate, activation) * up
    width: tl.constexpr = total.shape[1]
    to = block * width + tl.arange(0, width)
    inside = given[:, None] & (to < outs)[None, :]
    to_row = out + place.to(tl.int64)[:, None] * outs
    tl.store(to_row + to[None, :], total.to(out.dtype.element_ty), mask=inside)


def variants() -> Iterator[Variant]:
    """Shapes with 128 small experts and 8 large ones by rows; tiny ones with a remainder."""
    for inner, hidden, experts, slots in (
        (768, 2048, 128, 512),
        (768, 2048, 128, 8192),
        (14336, 4096, 8, 4096),
        (48, 96, 4, 16),
    ):
        yield _grouped_gemm_variant(hidden, 2 * inner, experts, slots, "silu")
        yield _grouped_gemm_variant(inner, hidden, experts, slots, None)
    pointers = {"topk_ids": "*i64"} | dict.fromkeys(
        ("sorted_slots", "slot_positions", "expert_offsets"), "*i32"
    )
    yield Variant(
        name="sort-slots",
        kernel=_sort_slots_kernel,
        signature={**pointers, "num_slots": "i32", "num_experts": "i32", "block": "constexpr"},
        constants={"block": _SORT_BLOCK},
    )
    pointers = {
        "expert_outputs": "*bf16",
        "slot_positions": "*i32",
        "topk_weights": "*fp32",
        "out": "*bf16",
    }
    yield Variant(
        name="weighted-sum",
        kernel=_weighted_sum_kernel,
        signature={**pointers, "size": "i32", "top_k": "constexpr", "block": "constexpr"},
        constants={"top_k": 8, "block": _SUM_BLOCK},
    )


def _grouped_gemm_variant(
    ins: int, outs: int, experts: int, slots: int, activation: ActivationKind | None
) -> Variant:
    tile = choose_grouped_gemm_tile(slots, experts)
    constants: dict[str, Any] = {
        "dot_dtype": tl.bfloat16,
        "activation": activation,
        "padded_experts": next_power_of_2(experts),
        "slots": tile.slots,
        "outputs": tile.outputs,
        "inputs": tile.inputs,
        "stages": tile.num_stages,
        "even": ins % tile.inputs == 0,
    }
    if activation is None:
        constants["sorted_slots"] = None
    numbers = (
        *("ins_16", "outs_16", "num_experts", "top_k"),
        *("num_slot_tiles", "num_output_tiles"),
    )
    return Variant(
        name=f"grouped-gemm-{ins}-{outs}-{experts}-{slots}",
        kernel=_grouped_gemm_kernel,
        signature={
            "x": "*bf16",
            "weight": "*bf16",
            "sorted_slots": "*i32" if activation else "constexpr",
            "expert_offsets": "*i32",
            "out": "*bf16",
            **dict.fromkeys(numbers, "i32"),
            **dict.fromkeys((name for name in constants if name != "sorted_slots"), "constexpr"),
        },
        constants=constants,
        num_warps=tile.num_warps,
    )
