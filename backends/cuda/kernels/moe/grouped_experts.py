"""A mixture of experts for many rows: slots, each a row and one of its experts, are dealt to their
experts on the device, and a product takes tiles of slots of one expert. The tiles are found in the
kernel, so that no count ever comes to the host; nothing is added in an order of chance.
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

from localgen.backends.cuda.kernels.gemm.dense import INPUTS
from localgen.backends.cuda.kernels.gemm.tile import Kind, acted, dot_type, output_ids
from localgen.backends.cuda.kernels.launch import Variant, launch

# slots that a program counts at once; numbers that one weighs
_DEALT, _WEIGHED = 1024, 1024


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """ids: int64 [rows, top_k], experts of each row. shares: float32 [rows, top_k]."""

    ids: Tensor
    shares: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """order: int32 [slots], slots expert by expert. places: int32 [slots], where each slot went.

    starts: int32 [experts + 1], where those of each expert begin.
    """

    order: Tensor
    places: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class GroupTile:
    """Slots, outputs and inputs of a program at once."""

    slots: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def group_tile(slots: int, experts: int) -> GroupTile:
    """By the mean number of slots an expert has."""
    mean = slots / experts
    if mean <= 16:
        return GroupTile(16, 64, 128, 4, 4)
    return GroupTile(64, 128, 64, 4, 4) if mean <= 96 else GroupTile(128, 128, 64, 8, 3)


def many_triton(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Chosen, kind: Kind) -> Tensor:
    """See experts.mixture."""
    (rows, hidden), (experts, _, inner_size) = x.shape, down.shape
    dealt = deal_triton(chosen.ids, experts)
    inner = torch.empty((chosen.ids.numel(), inner_size), dtype=x.dtype, device=x.device)
    answers = torch.empty((len(inner), hidden), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    top_k = chosen.ids.shape[1]
    _grouped(x.contiguous(), gate_up, dealt, inner, dealt.order, top_k, kind)
    _grouped(inner, down, dealt, answers, None, top_k, None)
    launch(_weigh, (rows, triton.cdiv(hidden, _WEIGHED)))(
        answers,
        dealt.places,
        chosen.shares.contiguous(),
        out,
        hidden,
        top_k=top_k,
        block=_WEIGHED,
        num_warps=4,
    )
    return out


def deal_triton(ids: Tensor, experts: int) -> Dealt:
    """Slots by their experts; those of an expert stay in order."""
    slots = ids.numel()
    order, places = (torch.empty(slots, dtype=torch.int32, device=ids.device) for _ in range(2))
    starts = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    launch(_deal, (experts,))(
        ids.contiguous(), order, places, starts, slots, experts, block=_DEALT, num_warps=4
    )
    return Dealt(order, places, starts)


def _grouped(
    x: Tensor,
    weight: Tensor,
    dealt: Dealt,
    out: Tensor,
    order: Tensor | None,
    top_k: int,
    kind: Kind | None,
) -> None:
    """Row p of out is for place p; it is made of row p of x or, by order, of the slot's row."""
    experts, outs, ins = weight.shape
    tile = group_tile(len(out), experts)
    # every expert can have one tile that is not full
    tiles = len(out) // tile.slots + min(experts, len(out))
    across = triton.cdiv(outs, tile.outputs)
    launch(_product, (tiles * across,))(
        x,
        weight,
        order,
        dealt.starts,
        out,
        ins // INPUTS,
        out.shape[1] // INPUTS,
        experts,
        top_k,
        tiles,
        across,
        dot=dot_type(x),
        kind=kind,
        lanes=triton.next_power_of_2(experts),
        slots=tile.slots,
        outputs=tile.outputs,
        inputs=tile.inputs,
        stages=tile.stages,
        even=ins % tile.inputs == 0,
        num_warps=tile.warps,
    )


@triton.jit(do_not_specialize=["slots"])
def _deal(ids, order, places, starts, slots, experts, block: tl.constexpr):
    """An expert's slots go behind those of all experts before it, in their order."""
    expert = tl.program_id(0)
    at = tl.arange(0, block)
    before = 0
    for first in range(0, slots, block):
        found = tl.load(ids + first + at, mask=first + at < slots, other=experts)
        before += tl.sum((found < expert).to(tl.int32))
    tl.store(starts + expert, before)
    if expert == experts - 1:
        tl.store(starts + experts, slots)
    for first in range(0, slots, block):
        found = tl.load(ids + first + at, mask=first + at < slots, other=experts)
        mine = (found == expert).to(tl.int32)
        place = before + tl.cumsum(mine) - 1
        tl.store(order + place, first + at, mask=mine > 0)
        tl.store(places + first + at, place, mask=mine > 0)
        before += tl.sum(mine)


@triton.jit
def _weigh(answers, places, shares, out, size, top_k: tl.constexpr, block: tl.constexpr):
    """Answers of a row's slots by their shares, one after the other."""
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for i in tl.static_range(top_k):
        place = tl.load(places + row * top_k + i).to(tl.int64)
        share = tl.load(shares + row * top_k + i)
        total += share * tl.load(answers + place * size + at, mask=at < size, other=0.0)
    tl.store(out + row.to(tl.int64) * size + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["tiles"])
def _product(
    x,
    weight,
    order,
    starts,
    out,
    ins_16,
    outs_16,
    experts,
    top_k,
    tiles,
    across,
    dot: tl.constexpr,
    kind: tl.constexpr,
    lanes: tl.constexpr,
    slots: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    stages: tl.constexpr,
    even: tl.constexpr,
):
    """[slots, inputs] @ [inputs, outputs] of one expert, summed over inputs."""
    ins, outs = ins_16 * 16, outs_16 * 16
    # 8 tiles of slots share what they read of the weight, out of the L2
    band = tl.program_id(0) // (8 * across)
    height = tl.minimum(tiles - band * 8, 8)
    inside_band = tl.program_id(0) % (8 * across)
    tile, block = band * 8 + inside_band % height, inside_band // height

    lane = tl.arange(0, lanes)
    start = tl.load(starts + lane, mask=lane < experts, other=0)
    end = tl.load(starts + lane + 1, mask=lane < experts, other=0)
    ends = tl.cumsum((end - start + slots - 1) // slots)
    expert = tl.sum((ends <= tile).to(tl.int32))
    if expert >= experts:
        return
    tile -= tl.max(tl.where(ends <= tile, ends, 0))
    place = tl.load(starts + expert) + tile * slots + tl.arange(0, slots)
    given = place < tl.load(starts + expert + 1)
    row = place
    if order is not None:
        row = tl.load(order + place, mask=given, other=0) // top_k

    paired: tl.constexpr = kind is not None
    own = output_ids(block, outs, outputs, paired).to(tl.int64)
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
        total = tl.dot(a.to(dot), w.to(dot), total, input_precision="ieee")
    if kind is not None:
        gate, up = tl.split(tl.reshape(total, [slots, outputs // 2, 2]))
        total = acted(gate, kind) * up
    width: tl.constexpr = total.shape[1]
    to = block * width + tl.arange(0, width)
    inside = given[:, None] & (to < outs)[None, :]
    to_row = out + place.to(tl.int64)[:, None] * outs
    tl.store(to_row + to[None, :], total.to(out.dtype.element_ty), mask=inside)


def variants() -> Iterator[Variant]:
    """Of 128 small experts and of 8 large ones, by rows; of tiny ones, with a rest."""
    for inner, hidden, experts, slots in (
        (768, 2048, 128, 512),
        (768, 2048, 128, 8192),
        (14336, 4096, 8, 4096),
        (48, 96, 4, 16),
    ):
        yield _product_variant(hidden, 2 * inner, experts, slots, "silu")
        yield _product_variant(inner, hidden, experts, slots, None)
    pointers = {"ids": "*i64", "order": "*i32", "places": "*i32", "starts": "*i32"}
    yield Variant(
        name="deal",
        kernel=_deal,
        signature={**pointers, "slots": "i32", "experts": "i32", "block": "constexpr"},
        constants={"block": _DEALT},
    )
    pointers = {"answers": "*bf16", "places": "*i32", "shares": "*fp32", "out": "*bf16"}
    yield Variant(
        name="weigh",
        kernel=_weigh,
        signature={**pointers, "size": "i32", "top_k": "constexpr", "block": "constexpr"},
        constants={"top_k": 8, "block": _WEIGHED},
    )


def _product_variant(ins: int, outs: int, experts: int, slots: int, kind: Kind | None) -> Variant:
    tile = group_tile(slots, experts)
    constants: dict[str, Any] = {
        "dot": tl.bfloat16,
        "kind": kind,
        "lanes": triton.next_power_of_2(experts),
        "slots": tile.slots,
        "outputs": tile.outputs,
        "inputs": tile.inputs,
        "stages": tile.stages,
        "even": ins % tile.inputs == 0,
    }
    if kind is None:
        constants["order"] = None
    numbers = ("ins_16", "outs_16", "experts", "top_k", "tiles", "across")
    return Variant(
        name=f"experts-{ins}-{outs}-{experts}-{slots}",
        kernel=_product,
        signature={
            "x": "*bf16",
            "weight": "*bf16",
            "order": "*i32" if kind else "constexpr",
            "starts": "*i32",
            "out": "*bf16",
            **dict.fromkeys(numbers, "i32"),
            **dict.fromkeys((name for name in constants if name != "order"), "constexpr"),
        },
        constants=constants,
        num_warps=tile.warps,
    )
