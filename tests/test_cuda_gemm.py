"""GEMM kernels for plain, int4 and FP8 weights equal their float64 references."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.activation import gated_activation_reference
from localgen.backends.cuda.kernels.fp8_rows import quantize_rows_fp8
from localgen.backends.cuda.kernels.gemm import (
    dense,
    fp8,
    gemv,
    int4,
    int4_format,
    int4_gemm,
    int4_gemv,
    int4_wide,
    skinny_gemm,
)
from localgen.backends.cuda.kernels.norm import RMSNorm, rms_norm_reference
from localgen.backends.cuda.model.linear import DenseLinear, Int4Linear, gated_linear

# largest error of an element, relative to the largest element
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that unwritten elements show."""
    make = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: make(*a, **k).fill_(math.nan))


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def few_rows(
    x: Tensor, weight: Tensor, *ends: Tensor | None, norm: RMSNorm | None = None, **options: Any
) -> Tensor:
    """The product by the Triton kernel for the number of rows."""
    if len(x) == 1:
        return gemv.gemv_triton(x, weight, *ends, norm=norm, **options)
    return skinny_gemm.skinny_gemm_triton(dense.normed(x, norm), weight, None, *ends, **options)


def same(ours: Tensor, exact: Tensor, limit: float | None = None) -> None:
    assert exact.dtype is torch.float64
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs().max().item() / exact.abs().max().item()
    assert error < (limit or LIMIT[ours.dtype]), error


# -- plain ------------------------------------------------------------------------------------

SHAPES = [(1, 2064, 37), (1, 48, 5), (1, 512, 16), (2, 1040, 33), (5, 512, 16), (8, 96, 70)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "ins", "outs"), SHAPES)
def test_dense_product_equals_the_reference(
    rows: int, ins: int, outs: int, adds: bool, dtype: torch.dtype
) -> None:
    x, weight = drawn(1, rows, ins, dtype=dtype), drawn(2, outs, ins, dtype=dtype)
    bias = drawn(3, outs, dtype=dtype) * 20 if adds else None
    residual = drawn(4, rows, outs, dtype=dtype) * 20 if adds else None
    ours = few_rows(x, weight, bias, residual)
    assert ours.dtype is dtype
    same(ours, dense.matmul_reference(*wide(x, weight, bias, residual)))


@pytest.mark.parametrize("rows", [1, 3, 11, 35])
def test_the_tiles_of_many_outputs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer outputs than real models have, to save time."""
    thin, one = (
        skinny_gemm.choose_skinny_gemm_tile(rows, 28672, 2),
        gemv.choose_gemv_tile(592, 28672),
    )
    assert (thin, one) != (
        skinny_gemm.choose_skinny_gemm_tile(rows, 70, 2),
        gemv.choose_gemv_tile(592, 70),
    )
    monkeypatch.setattr(skinny_gemm, "choose_skinny_gemm_tile", lambda *_: thin)
    monkeypatch.setattr(gemv, "choose_gemv_tile", lambda *_: one)
    for module, name in ((skinny_gemm, "_skinny_gemm_launcher"), (gemv, "_gemv_launcher")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)  # not cached
    x, weight = drawn(1, rows, 592), drawn(2, 70, 592)
    same(few_rows(x, weight), dense.matmul_reference(*wide(x, weight)))
    ours = few_rows(x, weight, activation="silu")
    same(ours, dense.gated_matmul_reference(x.double(), weight.double(), "silu"), 1e-5)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "ins", "size"), [(1, 1040, 23), (1, 48, 3), (4, 528, 19)])
def test_gated_product_equals_the_reference(
    rows: int, ins: int, size: int, kind: Literal["silu", "gelu_tanh"]
) -> None:
    for seed in range(3):
        x, weight = drawn(seed, rows, ins), drawn(9 + seed, 2 * size, ins) / 8
        ours = few_rows(x, weight, activation=kind)
        same(ours, dense.gated_matmul_reference(x.double(), weight.double(), kind), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("ins", "outs"), [(2064, 13), (512, 16), (48, 5)])
def test_product_of_a_normed_row_equals_the_reference(
    ins: int, outs: int, dtype: torch.dtype
) -> None:
    """The mean square is near eps, so that eps counts."""
    x, weight = drawn(1, 1, ins, dtype=dtype) / 16, drawn(2, 2 * outs, ins, dtype=dtype) / 8
    scale, residual = drawn(3, ins, dtype=dtype), drawn(4, 1, 2 * outs, dtype=dtype)
    norm = RMSNorm(scale, 4e-3)
    normed, _ = rms_norm_reference(
        x.double(), scale.double(), norm.eps, offset=False, residual=None
    )
    ours = few_rows(x, weight, None, residual, norm=norm)
    assert ours.dtype is dtype
    same(ours, normed @ weight.double().T + residual.double())
    same(
        few_rows(x, weight, activation="silu", norm=norm),
        dense.gated_matmul_reference(normed, weight.double(), "silu"),
        LIMIT[dtype] * 5,
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_norms_outside_the_kernel_equal_the_reference(rows: int) -> None:
    x, weight, scale = drawn(1, rows, 48).double(), drawn(2, 10, 48).double(), drawn(3, 48).double()
    norm = RMSNorm(scale, 1e-3)
    normed, _ = rms_norm_reference(x, scale, norm.eps, offset=False, residual=None)
    same(dense.matmul(x, weight, norm=norm), normed @ weight.T, 1e-14)
    gated = dense.gated_matmul_reference(normed, weight, "silu")
    same(dense.gated_matmul(x, weight, "silu", norm=norm), gated, 1e-14)
    ours = few_rows(x.float(), weight.float(), norm=RMSNorm(scale.float(), 1e-3))
    same(ours, normed @ weight.T)


@pytest.mark.parametrize("rows", [1, 6])
def test_bfloat16_product_equals_the_reference(rows: int) -> None:
    x, weight = (
        drawn(seed, *shape).bfloat16() for seed, shape in ((1, (rows, 272)), (2, (21, 272)))
    )
    same(few_rows(x, weight), dense.matmul_reference(x.double(), weight.double()))


def test_every_number_of_rows() -> None:
    x, weight = drawn(1, 9, 160), drawn(2, 20, 160)
    whole = x.double() @ weight.double().T
    for rows in range(1, 10):
        same(few_rows(x[:rows], weight), whole[:rows])


def test_a_row_of_nan_harms_no_other() -> None:
    """The next row does not leak in where the inputs are no multiple of a block."""
    x, weight = drawn(1, 3, 144), drawn(2, 20, 144)
    x[1] = math.nan
    ours = few_rows(x, weight)
    assert bool(ours[1].isnan().all())
    same(ours[::2], x[::2].double() @ weight.double().T)
    packed, grid, weight = int4_parts(1, 384, 20, 64)
    x = drawn(3, 3, 384)
    x[1] = math.nan
    same(int4_gemm.int4_matmul_triton(x, packed, grid)[::2], x[::2].double() @ weight.T, 3e-5)
    same(int4_wide.int4_wide_matmul_triton(x, packed, grid)[::2], x[::2].double() @ weight.T, 3e-5)


def test_tensors_left_to_cublas() -> None:
    weight = drawn(2, 8, 32, dtype=torch.float16)
    assert dense.supports_triton_gemm(drawn(1, 3, 32, dtype=torch.float16), weight)
    assert not dense.supports_triton_gemm(drawn(1, 3, 32), weight)
    assert not dense.supports_triton_gemm(drawn(1, 0, 32, dtype=torch.float16), weight)
    assert not dense.supports_triton_gemm(
        drawn(1, 3, 32, dtype=torch.float16), weight[:, :24].contiguous()
    )
    assert not dense.supports_triton_gemm(drawn(1, 3, 16, dtype=torch.float16), weight[:, :16])


def test_the_public_functions_on_the_cpu_keep_float64() -> None:
    x, weight = drawn(1, 3, 20).double(), drawn(2, 6, 20).double()
    exact = dense.matmul(x, weight, weight[:, 0], x[:, :6])
    same(exact, x @ weight.T + weight[:, 0] + x[:, :6], 1e-15)
    gate, up = (x @ weight.T).chunk(2, -1)
    same(gated_linear(DenseLinear(weight), x, "silu"), gate * gate.sigmoid() * up, 1e-14)
    biased = gated_linear(DenseLinear(weight, weight[:, 0]), x, "silu")
    gate, up = (x @ weight.T + weight[:, 0]).chunk(2, -1)
    same(biased, gate * gate.sigmoid() * up, 1e-14)


# -- int4 -------------------------------------------------------------------------------------


def int4_parts(seed: int, ins: int, outs: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """packed, grid, and the weight as float64."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(0, 16, (outs, ins), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outs, ins // group), generator=generator, dtype=torch.uint8)
    scales = (0.01 + 0.01 * torch.rand((outs, ins // group), generator=generator)).half()
    by_group = digits.view(outs, -1, group).double() - zeros[..., None].double()
    weight = (by_group * scales[..., None].double()).flatten(1)
    return int4_format.pack_int4(digits), int4_format.pack_grid(scales, zeros), weight


@pytest.mark.parametrize("ins", [128, 256, 1152, 8, 200])
def test_digits_come_back_out_of_their_tiles(ins: int) -> None:
    digits = torch.randint(0, 16, (5, ins), dtype=torch.uint8)
    packed = int4_format.pack_int4(digits)
    assert packed.shape == (5, ins // 2)
    assert torch.equal(int4_format.unpack_int4(packed), digits)
    if not int4_format.is_tiled(ins):
        assert torch.equal(packed[:, 0], digits[:, 0] | digits[:, 1] << 4)


def test_int4_digit_positions() -> None:
    """Input 32 s + 2 i + h of the second tile is digit s of half h of its word i."""
    for s, i, h in ((0, 0, 0), (0, 0, 1), (3, 15, 1), (2, 7, 0)):
        digits = torch.zeros((1, 256), dtype=torch.uint8)
        digits[0, 128 + 32 * s + 2 * i + h] = 15
        words = int4_format.pack_int4(digits).view(torch.int32).long() & 0xFFFFFFFF
        assert words[0, 16 + i] == 15 << (4 * s + 16 * h)
        assert words.count_nonzero() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "ins", "outs", "group"),
    [
        (8, 256, 40, 64),
        (3, 384, 16, 384),
        (5, 512, 33, 256),
        (2, 1152, 17, 32),
        (12, 640, 40, 128),
        (16, 384, 35, 96),
    ],
)
def test_int4_product_equals_the_reference(
    rows: int, ins: int, outs: int, group: int, dtype: torch.dtype
) -> None:
    packed, grid, weight = int4_parts(rows, ins, outs, group)
    x, bias = drawn(5, rows, ins, dtype=dtype), drawn(6, outs, dtype=dtype)
    ours = int4_gemm.int4_matmul_triton(x, packed, grid, bias)
    assert ours.dtype is dtype
    # sums with the exponents' 1024 in them cost 7 bits of float32
    limit = 3e-5 if dtype is torch.float32 else None
    same(ours, x.double() @ weight.T + bias.double(), limit)
    same(int4.int4_matmul_reference(*wide(x, packed, grid, bias)), exact_of(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("ins", "outs", "group"),
    [(1024, 24, 128), (1152, 18, 32), (384, 17, 96), (4096, 9, 64), (4224, 6, 384)],
)
def test_int4_product_of_one_row_equals_the_reference(
    ins: int, outs: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, grid, weight = int4_parts(1, ins, outs, group)
    x, bias = drawn(2, 1, ins, dtype=dtype), drawn(3, outs, dtype=dtype)
    wanted = x.double() @ weight.T + bias.double()
    same(int4_gemv.int4_gemv_triton(x, packed, grid, bias), wanted, LIMIT[dtype])
    tile = int4_gemv.choose_int4_gemv_tile(28672, 128)
    assert tile != int4_gemv.choose_int4_gemv_tile(outs, group)
    monkeypatch.setattr(int4_gemv, "choose_int4_gemv_tile", lambda *_: tile)
    int4_gemv._launcher.cache_clear()
    same(int4_gemv.int4_gemv_triton(x, packed, grid, bias), wanted, LIMIT[dtype])
    int4_gemv._launcher.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("ins", "outs", "group"), [(1024, 24, 128), (1152, 18, 32), (384, 16, 96)])
def test_int4_product_of_a_normed_row_equals_the_reference(
    ins: int, outs: int, group: int, dtype: torch.dtype
) -> None:
    """The mean square is near eps, so that eps counts; or x times the norm's weight overflows
    float16."""
    packed, grid, weight = int4_parts(1, ins, outs, group)
    for size, by in ((1 / 16, 1.0), (2000.0, 30.0)):
        x = drawn(2, 1, ins, dtype=dtype) * size
        scale, residual = drawn(3, ins, dtype=dtype) * by, drawn(4, 1, outs, dtype=dtype)
        norm = RMSNorm(scale, 4e-3)
        normed, _ = rms_norm_reference(
            x.double(), scale.double(), norm.eps, offset=False, residual=None
        )
        ours = int4_gemv.int4_gemv_triton(x, packed, grid, None, residual, norm=norm)
        same(ours, normed @ weight.T + residual.double(), LIMIT[dtype])
        gated = int4_gemv.int4_gemv_triton(x, packed, grid, activation="silu", norm=norm)
        exact = gated_activation_reference(normed @ weight.T, "silu")
        same(gated, exact, LIMIT[dtype] * 5)


@pytest.mark.parametrize("rows", [2, 5, 20])
def test_gated_int4_product_equals_the_reference(rows: int) -> None:
    packed, grid, weight = int4_parts(1, 256, 40, 64)
    x = drawn(2, rows, 256)
    ours = int4_gemm.int4_matmul_triton(x, packed, grid, activation="gelu_tanh")
    same(ours, gated_activation_reference(x.double() @ weight.T, "gelu_tanh"), 1e-4)


def test_the_int4_tiles_of_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = int4_gemm.choose_int4_tile(10, 28672, 64)
    assert tile != int4_gemm.choose_int4_tile(10, 70, 64)
    monkeypatch.setattr(int4_gemm, "choose_int4_tile", lambda *_: tile)
    packed, grid, weight = int4_parts(1, 640, 70, 64)
    x = drawn(2, 10, 640)
    same(int4_gemm.int4_matmul_triton(x, packed, grid), x.double() @ weight.T, 3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "ins", "outs", "group", "tile_of"),
    [
        (30, 256, 70, 128, (32, 4096, 256, 128, 90, 1)),
        (70, 384, 65, 32, (70, 4096, 4096, 32, 80, 1)),
        (66, 256, 33, 64, (66, 28672, 4096, 64, 90, 132)),
        (20, 1408, 70, 128, (20, 4096, 1408, 128, 90, 132)),
        (70, 640, 65, 32, (70, 4096, 4096, 32, 80, 132)),
    ],
)
def test_int4_product_of_many_rows_equals_the_reference(
    rows: int,
    ins: int,
    outs: int,
    group: int,
    tile_of: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile = int4_wide.choose_int4_wide_tile(*tile_of)
    monkeypatch.setattr(int4_wide, "choose_int4_wide_tile", lambda *_: tile)
    packed, grid, weight = int4_parts(rows, ins, outs, group)
    x, bias = drawn(5, rows, ins, dtype=dtype), drawn(6, outs, dtype=dtype)
    ours = int4_wide.int4_wide_matmul_triton(x, packed, grid, bias)
    assert ours.dtype is dtype
    limit = 3e-5 if dtype is torch.float32 else None
    same(ours, exact_of(x, weight, bias), limit)
    residual = drawn(7, rows, outs, dtype=dtype)
    ours = int4_wide.int4_wide_matmul_triton(x, packed, grid, bias, residual)
    same(ours, exact_of(x, weight, bias) + residual.double(), limit)


def test_inputs_are_divided_if_there_are_few_outputs() -> None:
    """Until there are two programs for each SM, or one with the largest tile."""
    for rows, outs, ins, splits in (
        (32, 4096, 4096, 8),
        (64, 6144, 4096, 5),
        (128, 28672, 4096, 1),
        (256, 4096, 14336, 4),
        (17, 1024, 896, 1),
    ):
        assert int4_wide.choose_int4_wide_tile(rows, outs, ins, 128, 90, 132).splits == splits


def test_scales_of_bfloat16_and_float32() -> None:
    packed, grid, weight = int4_parts(1, 256, 20, 64)
    scales, zeros = grid.double().unbind(-1)
    x = drawn(2, 3, 256)
    for kind in (torch.bfloat16, torch.float32):
        # float32 is stored as float16, from which these scales come
        grid = int4_format.pack_grid(scales.to(kind), zeros.to(torch.uint8))
        assert grid.dtype is (torch.bfloat16 if kind is torch.bfloat16 else torch.float16)
        weight = int4_format.dequantize_int4(packed, grid, torch.float64)
        for product in (int4_gemm.int4_matmul_triton, int4_wide.int4_wide_matmul_triton):
            same(product(x, packed, grid), x.double() @ weight.T, 3e-5)
        same(int4_format.dequantize_int4_triton(packed, grid, torch.float32), weight, 1e-7)


@pytest.mark.parametrize(("ins", "outs", "group"), [(128, 9, 32), (1280, 17, 128), (384, 8, 384)])
def test_int4_dequantization_equals_the_reference(ins: int, outs: int, group: int) -> None:
    packed, grid, weight = int4_parts(3, ins, outs, group)
    same(int4_format.dequantize_int4_triton(packed, grid, torch.float32), weight, 1e-7)
    same(int4_format.dequantize_int4(packed, grid, torch.float64), weight, 1e-15)


def test_int4_product_with_reordered_inputs_equals_the_reference() -> None:
    packed, grid, weight = int4_parts(4, 256, 12, 64)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(5))
    x = drawn(6, 3, 256).double()
    linear = Int4Linear(packed, grid, None, order)
    same(linear(x), x[:, order] @ weight.T, 1e-12)


# -- FP8 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "ins", "outs"),
    [(1, 512, 20), (1, 1040, 16), (7, 96, 33), (16, 256, 40), (50, 272, 40)],
)
def test_fp8_product_equals_the_reference(
    rows: int, ins: int, outs: int, dtype: torch.dtype
) -> None:
    weight = (drawn(1, outs, ins) * 20).to(torch.float8_e4m3fn)
    weight[0, :4] = torch.tensor([448.0, -448.0, 2.0**-9, -(2.0**-9)]).to(weight.dtype)
    scale, bias = drawn(2, outs).abs() / 10, drawn(3, outs, dtype=dtype)
    x = drawn(4, rows, ins, dtype=dtype)
    exact = exact_of(x, weight.double() * scale.double()[:, None], bias)
    same(skinny_gemm.skinny_gemm_triton(x, weight, scale, bias), exact)
    same(fp8.fp8_matmul(*wide(x, weight, scale, bias)), exact)


def test_rows_become_fp8_by_a_scale_of_their_own() -> None:
    x = drawn(1, 5, 64) * torch.tensor([[1e-4], [1.0], [300.0], [1e4], [0.0]])
    rows = quantize_rows_fp8(x)
    small, scales = rows.values, rows.scales
    assert small.dtype is torch.float8_e4m3fn
    back = small.float() * scales
    assert bool(((back - x).abs() <= x.abs() * 2**-4 + scales * 2**-9).all())


# -- all --------------------------------------------------------------------------------------


def exact_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.double() @ weight.T + bias.double()


def wide(*tensors: Tensor | None) -> Any:
    """Floats of 16 and 32 bits as float64; float32 scales, which references convert, unchanged."""
    floats = (torch.float32, torch.float16, torch.bfloat16)
    return [t.double() if t is not None and t.dtype in floats else t for t in tensors]
