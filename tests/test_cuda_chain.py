"""Kernels of a layer's chain equal their float64 references: norm, rotary positions, gate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from localgen.backends.cuda.kernels.activation import (
    gated_activation,
    gated_activation_reference,
    gated_activation_triton,
)
from localgen.backends.cuda.kernels.kv_cache import LayerKV, dequantize_kv
from localgen.backends.cuda.kernels.norm import rms_norm, rms_norm_reference, rms_norm_triton
from localgen.backends.cuda.kernels.rope import (
    QKNorm,
    rope_and_store_kv,
    rope_and_store_kv_reference,
    rope_and_store_kv_triton,
)

# largest error of an element, relative to the largest element
LIMIT = {torch.float32: 2e-6, torch.float16: 2e-3}
PAGE_TOKENS = 16


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that unwritten elements show."""

    def poisoned(make: Any) -> Any:
        return lambda *a, **k: make(*a, **k).fill_(math.nan)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def same(ours: Tensor, exact: Tensor, limit: float | None = None) -> None:
    assert exact.dtype is torch.float64
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs().max().item() / exact.abs().max().item()
    assert error < (limit or LIMIT[ours.dtype]), error


# -- norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("shape", [(3, 64), (1, 4096), (5, 897), (2, 3, 96), (1, 16384), (2, 1)])
def test_norm_equals_the_reference(
    shape: tuple[int, ...], offset: bool, adds: bool, dtype: torch.dtype
) -> None:
    x, weight = 3 * drawn(1, *shape, dtype=dtype), drawn(2, shape[-1], dtype=dtype)
    residual = drawn(3, *shape, dtype=dtype) if adds else None
    ours, summed = rms_norm_triton(x, weight, 1e-5, offset=offset, residual=residual)
    exact, exact_sum = rms_norm_reference(
        x.double(),
        weight.double(),
        1e-5,
        offset=offset,
        residual=None if residual is None else residual.double(),
    )
    assert ours.dtype is summed.dtype is dtype
    same(ours, exact)
    same(summed, exact_sum)
    on_cpu, _ = rms_norm(x, weight, 1e-5, offset=offset, residual=residual)
    same(on_cpu, exact)


@pytest.mark.parametrize("size", [96, 2048])
def test_the_norm_is_that_of_the_rounded_sum(size: int) -> None:
    x, weight = drawn(1, 4, size, dtype=torch.float16), drawn(2, size, dtype=torch.float16)
    ours, summed = rms_norm_triton(x, weight, 1e-5, offset=False, residual=100 * x.flip(0))
    again, _ = rms_norm_triton(summed, weight, 1e-5, offset=False, residual=None)
    assert (ours == again).all()


def test_norm_of_a_cut_row_and_of_no_rows() -> None:
    x = drawn(1, 4, 200)[:, 3:131]
    ours, _ = rms_norm_triton(x, drawn(2, 128), 1e-6, offset=False, residual=x)
    exact, _ = rms_norm_reference(
        x.double(), drawn(2, 128).double(), 1e-6, offset=False, residual=x.double()
    )
    same(ours, exact)
    none, _ = rms_norm_triton(x[:0], drawn(2, 128), 1e-6, offset=False, residual=None)
    assert none.shape == (0, 128)


def test_a_row_of_zeros_stays_zero() -> None:
    ours, _ = rms_norm_triton(torch.zeros(1, 70), torch.ones(70), 1e-6, offset=False, residual=None)
    assert (ours == 0).all()


# -- gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 1024), (2, 2731), (7, 96)])
def test_gate_equals_the_reference(
    rows: int, size: int, kind: Literal["silu", "gelu_tanh"], dtype: torch.dtype
) -> None:
    x = 3 * drawn(rows, rows, 2 * size, dtype=dtype)
    exact = gated_activation_reference(x.double(), kind)
    same(gated_activation_triton(x, kind), exact)
    same(gated_activation(x, kind), exact)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gate_of_large_inputs_equals_the_reference(kind: Literal["silu", "gelu_tanh"]) -> None:
    x = torch.tensor([[-1e4, -100.0, -30.0, 0.0, 30.0, 1e4, 1, 1, 1, 1, 1, 1]])
    same(gated_activation_triton(x, kind), gated_activation_reference(x.double(), kind))


# -- rotary positions and the cache -----------------------------------------------------------


def cache_of(dtype: torch.dtype, kv_heads: int, size: int, pages: int = 6) -> LayerKV:
    """A cache filled with NaN."""
    cache = LayerKV.zeros((pages, kv_heads, PAGE_TOKENS, size), device="cpu", dtype=dtype)
    for tensor in cache.tensors:
        tensor.copy_(torch.full(tensor.shape, 100.0))
    return cache


def table(half: int, positions: int = 50) -> tuple[Tensor, Tensor]:
    angles = torch.arange(positions)[:, None] / 1e4 ** (torch.arange(half) / half)
    return angles.cos(), angles.sin()


# rows, heads, kv heads, size, rotated
SHAPES = [
    (5, 8, 2, 64, 64),
    (1, 32, 8, 128, 128),
    (3, 3, 1, 96, 96),
    (70, 4, 4, 64, 64),
    (2, 6, 3, 128, 96),
    (2, 4, 2, 256, 256),
    (66, 2, 1, 80, 20),
]
SHAPE = "rows, heads, kv_heads, size, rotated"


def norms_of(size: int, offset: bool, dtype: torch.dtype) -> QKNorm:
    return QKNorm(drawn(8, size, dtype=dtype), drawn(9, size, dtype=dtype), 1e-6, offset)


def wider(norms: QKNorm | None) -> QKNorm | None:
    return norms and replace(
        norms, q_weight=norms.q_weight.double(), k_weight=norms.k_weight.double()
    )


def places(rows: int) -> tuple[Tensor, Tensor]:
    """Positions and slots; every fourth row is not stored."""
    generator = torch.Generator().manual_seed(rows)
    slots = torch.randperm(6 * PAGE_TOKENS, generator=generator)[:rows]
    slots[3::4] = -1
    return torch.randint(0, 50, (rows,), generator=generator, dtype=torch.int32), slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norm", [None, False, True])
@pytest.mark.parametrize(SHAPE, SHAPES)
def test_rope_equals_the_reference(
    rows: int,
    heads: int,
    kv_heads: int,
    size: int,
    rotated: int,
    norm: bool | None,
    dtype: torch.dtype,
) -> None:
    qkv = drawn(rows, rows, (heads + 2 * kv_heads) * size, dtype=dtype)
    positions, slots = places(rows)
    norms = None if norm is None else norms_of(size, norm, dtype)
    rotation = table(rotated // 2)
    ours, exact = cache_of(dtype, kv_heads, size), cache_of(torch.float64, kv_heads, size)
    queries = rope_and_store_kv_triton(qkv, positions, rotation, norms, ours, slots)
    expected = rope_and_store_kv_reference(
        qkv.double(), positions, rotation, wider(norms), exact, slots
    )
    assert queries.shape == (rows, heads, size)
    same(queries, expected)
    same(ours.keys, exact.keys, LIMIT[dtype])
    same(ours.values, exact.values, LIMIT[dtype])
    # nothing else was written
    stored = torch.zeros(6 * PAGE_TOKENS, dtype=torch.bool)
    stored[slots[slots >= 0]] = True
    untouched = ours.keys.transpose(1, 2).flatten(0, 1)[~stored]
    assert (untouched == 100).all()


@pytest.mark.parametrize("norm", [None, True])
@pytest.mark.parametrize(SHAPE, SHAPES)
def test_rope_into_int8(
    rows: int, heads: int, kv_heads: int, size: int, rotated: int, norm: bool | None
) -> None:
    qkv = drawn(rows, rows, (heads + 2 * kv_heads) * size)
    positions, slots = places(rows)
    norms = None if norm is None else norms_of(size, norm, torch.float32)
    rotation = table(rotated // 2)
    ours, twin = cache_of(torch.int8, kv_heads, size), cache_of(torch.int8, kv_heads, size)
    exact = cache_of(torch.float64, kv_heads, size)
    queries = rope_and_store_kv_triton(qkv, positions, rotation, norms, ours, slots)
    public = rope_and_store_kv(qkv, positions, rotation, norms, twin, slots)
    expected = rope_and_store_kv_reference(
        qkv.double(), positions, rotation, wider(norms), exact, slots
    )
    same(queries, expected)
    same(public, expected)
    for mine, scales, theirs, their_scales, true in (
        (ours.keys, ours.key_scales, twin.keys, twin.key_scales, exact.keys),
        (ours.values, ours.value_scales, twin.values, twin.value_scales, exact.values),
    ):
        assert scales is not None
        assert their_scales is not None
        torch.testing.assert_close(scales, their_scales, rtol=2e-6, atol=0)
        # a rounding of the last bit in float32 may tip a value to the next of its eight bits
        assert (mine != theirs).float().mean() < 2e-3
        stored = scales != 100
        assert stored.sum() == (slots >= 0).sum() * kv_heads
        assert (mine[~stored] == 100).all()
        error = (dequantize_kv(mine, scales).double() - true)[stored].abs()
        assert (error <= 0.501 * scales[stored][:, None]).all()


@pytest.mark.parametrize(SHAPE, SHAPES)
def test_rope_into_float8(rows: int, heads: int, kv_heads: int, size: int, rotated: int) -> None:
    """Only values that fit: rounding of others is up to the hardware; the interpreter is wrong."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 127, (rows, heads + 2 * kv_heads, size), generator=generator)
    codes += 128 * torch.randint(0, 2, codes.shape, generator=generator)
    codes[..., size // 3] = 126  # 448, the largest of each head
    small = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-9, 3, codes.shape[:2], generator=generator)
    qkv = (small.float() * scales[..., None]).flatten(1)
    _, slots = places(rows)
    ours = cache_of(torch.float8_e4m3fn, kv_heads, size)
    there = torch.zeros(rows, dtype=torch.int32)  # where nothing turns
    rope_and_store_kv_triton(qkv, there, table(rotated // 2), None, ours, slots)
    for mine, by, first in (
        (ours.keys, ours.key_scales, heads),
        (ours.values, ours.value_scales, heads + kv_heads),
    ):
        assert by is not None
        own = slice(first, first + kv_heads)
        kept = slots >= 0
        expected = torch.full((6 * PAGE_TOKENS, kv_heads, size), 100.0)
        expected = expected.to(torch.float8_e4m3fn).float()
        expected[slots[kept]] = small[kept, own].float()
        assert (mine.float().transpose(1, 2).flatten(0, 1) == expected).all()
        assert (by.transpose(1, 2).flatten(0, 1)[slots[kept]] == scales[kept, own]).all()


def test_a_head_of_zeros_in_eight_bits() -> None:
    cache = cache_of(torch.int8, 1, 64)
    rope_and_store_kv_triton(
        torch.zeros(1, 3 * 64),
        torch.zeros(1, dtype=torch.int32),
        table(32),
        None,
        cache,
        torch.tensor([17]),
    )
    assert (cache.keys[1, 0, 1] == 0).all()
    assert (cache.values[1, 0, 1] == 0).all()


def test_halves_round_to_even_in_int8() -> None:
    """As torch rounds: rounding halves up would store other values."""
    values = torch.zeros(64)
    values[:6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    qkv = torch.cat([torch.zeros(128), values])[None]
    cache = cache_of(torch.int8, 1, 64)
    rope_and_store_kv_triton(
        qkv, torch.zeros(1, dtype=torch.int32), table(32), None, cache, torch.tensor([0])
    )
    assert cache.values[0, 0, 0, :6].tolist() == [127, 0, 2, 2, 0, -2]
