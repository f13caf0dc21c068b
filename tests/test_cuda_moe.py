"""Mixture-of-experts kernels equal their float64 reference; slots are assigned in order."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.moe.fused_experts import (
    fused_experts,
    fused_experts_reference,
    small_batch_experts_triton,
)
from localgen.backends.cuda.kernels.moe.grouped_experts import (
    ExpertRouting,
    choose_grouped_gemm_tile,
    grouped_experts_triton,
    sort_slots_by_expert_triton,
)

# largest error of an element, relative to the largest element
LIMIT = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, or with integers that are no valid index."""

    def poisoned(make: Any) -> Any:
        def fill(*a: Any, **k: Any) -> Tensor:
            made: Tensor = make(*a, **k)
            return made.fill_(math.nan if made.is_floating_point() else 2**30)

        return fill

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chosen(seed: int, rows: int, experts: int, top_k: int) -> ExpertRouting:
    """Different experts for each row, one more frequent, with weights that do not add up to 1."""
    logits = drawn(seed, rows, experts)
    logits[:, experts // 2] += 2
    shares, ids = logits.softmax(-1).topk(top_k)
    return ExpertRouting(ids, shares)


def weights(experts: int, inner: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = drawn(1, experts, 2 * inner, hidden) / hidden**0.5
    down = drawn(2, experts, hidden, inner) / inner**0.5
    return gate_up.to(dtype), down.to(dtype)


def same(ours: Tensor, exact: Tensor) -> None:
    assert exact.dtype is torch.float64
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs().max().item() / exact.abs().max().item()
    assert error < LIMIT[ours.dtype], error


def exact(x: Tensor, gate_up: Tensor, down: Tensor, picked: ExpertRouting, kind: Any) -> Tensor:
    return fused_experts_reference(x.double(), gate_up.double(), down.double(), picked, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "inner", "hidden"),
    [(1, 5, 2, 48, 80), (1, 8, 8, 16, 32), (2, 9, 3, 16, 96), (1, 4, 1, 80, 48)],
)
def test_small_batches_equal_the_reference(
    rows: int, experts: int, top_k: int, inner: int, hidden: int, dtype: torch.dtype
) -> None:
    gate_up, down = weights(experts, inner, hidden, dtype)
    x, picked = drawn(3, rows, hidden, dtype=dtype), chosen(4, rows, experts, top_k)
    ours = small_batch_experts_triton(x, gate_up, down, picked, "silu")
    assert ours.dtype is dtype
    same(ours, exact(x, gate_up, down, picked, "silu"))


def test_small_batches_with_wide_experts_equal_the_reference() -> None:
    gate_up, down = weights(6, 80, 16, torch.float32)
    x, picked = drawn(3, 1, 16), chosen(4, 1, 6, 5)
    same(
        small_batch_experts_triton(x, gate_up, down, picked, "silu"),
        exact(x, gate_up, down, picked, "silu"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "inner", "hidden"),
    [
        (9, 5, 2, 48, 80),
        (11, 16, 4, 32, 160),
        (40, 3, 2, 64, 32),
        (150, 2, 1, 80, 48),
        (130, 2, 2, 16, 144),
    ],
)
def test_large_batches_equal_the_reference(
    rows: int, experts: int, top_k: int, inner: int, hidden: int, dtype: torch.dtype
) -> None:
    gate_up, down = weights(experts, inner, hidden, dtype)
    x, picked = drawn(5, rows, hidden, dtype=dtype), chosen(6, rows, experts, top_k)
    same(
        grouped_experts_triton(x, gate_up, down, picked, "gelu_tanh"),
        exact(x, gate_up, down, picked, "gelu_tanh"),
    )


def test_large_batch_cases_cover_every_tile() -> None:
    means = {
        choose_grouped_gemm_tile(rows * top_k, experts)
        for rows, experts, top_k in ((9, 5, 2), (40, 3, 2), (130, 2, 2))
    }
    assert len(means) == 3


@pytest.mark.parametrize("mixed", [small_batch_experts_triton, grouped_experts_triton])
def test_a_row_of_nan_harms_no_other(mixed: Any) -> None:
    gate_up, down = weights(3, 16, 80, torch.float32)
    x, picked = drawn(7, 3, 80), chosen(8, 3, 3, 2)
    x[1] = math.nan
    ours = mixed(x, gate_up, down, picked, "silu")
    same(ours[::2], exact(x, gate_up, down, picked, "silu")[::2])


def test_an_expert_that_all_rows_choose_and_others_that_none_does() -> None:
    gate_up, down = weights(6, 32, 48, torch.float32)
    x = drawn(7, 20, 48)
    picked = ExpertRouting(torch.full((20, 1), 4), drawn(8, 20, 1).abs())
    same(
        grouped_experts_triton(x, gate_up, down, picked, "silu"),
        exact(x, gate_up, down, picked, "silu"),
    )


def test_the_public_function_on_the_cpu() -> None:
    gate_up, down = weights(4, 24, 40, torch.float32)
    x, picked = drawn(9, 3, 40), chosen(10, 3, 4, 2)
    same(fused_experts(x, gate_up, down, picked, "silu"), exact(x, gate_up, down, picked, "silu"))


@pytest.mark.parametrize(("slots", "experts"), [(1, 3), (40, 7), (2500, 5)])
def test_slots_are_assigned_in_order(slots: int, experts: int) -> None:
    ids = torch.randint(0, experts, (slots,), generator=torch.Generator().manual_seed(slots))
    dealt = sort_slots_by_expert_triton(ids, experts)
    assert torch.equal(dealt.sorted_slots.long(), ids.argsort(stable=True))
    assert torch.equal(dealt.slot_positions[dealt.sorted_slots.long()].long(), torch.arange(slots))
    ends = torch.bincount(ids, minlength=experts).cumsum(0)
    assert dealt.expert_offsets.tolist() == [0, *ends.tolist()]


def test_tiles_suffice_for_any_assignment() -> None:
    """The host's number of tiles is never less than the experts need."""
    for slots, experts in ((1, 8), (16, 1), (100, 7), (129, 128), (5000, 8)):
        size = choose_grouped_gemm_tile(slots, experts).slots
        most = slots // size + min(experts, slots)
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(0, experts, (slots,), generator=generator)
            counts = torch.bincount(ids, minlength=experts)
            assert int(((counts + size - 1) // size).sum()) <= most
