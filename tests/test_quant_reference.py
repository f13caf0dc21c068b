"""GPTQ, AWQ and SmoothQuant give the integers of a float64 reference of their papers."""

from __future__ import annotations

import numpy as np
import pytest
import quant_reference as reference
import torch
from torch import Tensor

from localgen.quant.calibrate.input_stats import InputStats
from localgen.quant.calibrate.scaling import ScaleMapping
from localgen.quant.methods.awq import awq_grid, search_awq_scales
from localgen.quant.methods.gptq import correct_inputs, factor_hessian, gptq_grid, round_gptq
from localgen.quant.methods.grid import clipped_grid, full_range_grid, searched_grid, split_groups
from localgen.quant.methods.w8a8 import round_to_int8, smoothquant_scales
from localgen.quant.request.recipe import Recipe

OUTS, INS, SIZE, TOKENS = 6, 64, 16, 200


def problem(seed: int) -> tuple[Tensor, Tensor]:
    """A weight [out, in] and inputs [tokens, in]: correlated, some channels far larger."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(INS, INS, generator=generator) / INS**0.5
    sizes = torch.exp(torch.randn(INS, generator=generator))
    x = (torch.randn(TOKENS, INS, generator=generator) @ (mix + torch.eye(INS))) * sizes
    return torch.randn(OUTS, INS, generator=generator), x


def moments_of(x: Tensor, block: int) -> InputStats:
    moments = InputStats(INS, block)
    # in batches, as in calibration
    for part in torch.split(x, 64):
        moments.add(part)
    return moments


def mapping(*linears: str) -> ScaleMapping:
    return ScaleMapping(
        source="norm", source_is_norm=True, consumers=(linears,), stats_linear=linears[0]
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("clip", [True, False])
def test_gptq_equals_the_reference(seed: int, bits: int, clip: bool) -> None:
    weight, x = problem(seed)
    weight, hessian = weight.double(), x.double().t() @ x.double()
    recipe = Recipe(method="gptq", bits=bits, group_size=SIZE, clip=clip)
    grid = gptq_grid(weight, recipe)
    shared = factor_hessian(hessian, damping=0.01, desc_act=True, name="test")
    found = round_gptq(weight, grid, shared)
    parts = (grid.scales[..., 0].numpy(), grid.zeros[..., 0].numpy())
    wanted = reference.gptq(weight.numpy(), hessian.numpy(), parts, bits=bits, damping=0.01)
    assert np.array_equal(found.codes.numpy(), wanted)


@pytest.mark.parametrize("ins", [96, 320])
def test_gptq_across_blocks_and_in_float32(ins: int) -> None:
    """Float32 sums decide some near ties differently, which must not cost measurable loss."""
    generator = torch.Generator().manual_seed(ins)
    weight = torch.randn(8, ins, generator=generator)
    x = torch.randn(600, ins, generator=generator) @ torch.randn(ins, ins, generator=generator)
    hessian = x.t() @ x
    grid = gptq_grid(weight, Recipe(method="gptq", bits=4, group_size=32))
    shared = factor_hessian(hessian, damping=0.01, desc_act=True, name="test")
    found = round_gptq(weight, grid, shared)
    parts = (grid.scales[..., 0].double().numpy(), grid.zeros[..., 0].double().numpy())
    wanted = reference.gptq(
        weight.double().numpy(), hessian.double().numpy(), parts, bits=4, damping=0.01
    )
    assert (found.codes.numpy() == wanted).mean() > 0.97
    steps, zeros = (np.repeat(part, 32, 1) for part in parts)

    def loss(values: Tensor) -> float:
        return float((x.double() @ (values.double() - weight).t()).square().sum())

    ours, theirs = loss(found.dequantize()), loss(torch.from_numpy((wanted - zeros) * steps))
    assert ours < 1.02 * theirs
    assert ours < 0.6 * loss(grid.fake_quantize(weight.view(8, -1, 32)).flatten(1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("desc_act", [True, False])
def test_correction_of_inputs_is_the_least_squares_solution(
    seed: int, share: float, desc_act: bool
) -> None:
    weight, x = problem(seed)
    weight, x = weight.double(), x.double()
    original = x + 0.3 * problem(seed + 50)[1].double()
    factor = factor_hessian(x.t() @ x, damping=0.01, desc_act=desc_act, name="test")
    mismatch = (original - x).t() @ x
    found = correct_inputs(weight, mismatch, factor, share)
    wanted = reference.corrected(weight.numpy(), x.numpy(), original.numpy(), share, 0.01)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9, atol=1e-9)


def test_asymmetric_gptq_is_closer_to_the_original_outputs() -> None:
    """On wrong inputs, rounded to the same grid, and never further from them than plain GPTQ."""
    losses: dict[float, float] = dict.fromkeys((0.0, 0.25, 1.0), 0.0)
    for seed in range(4):
        weight, x = problem(seed)
        original = x + 0.2 * problem(seed + 50)[1]
        stats = InputStats(INS, INS, with_mismatch=True)
        for part, pair in zip(torch.split(x, 64), torch.split(original, 64), strict=True):
            stats.add(part, pair)
        assert stats.mismatch is not None
        grid = gptq_grid(weight, Recipe(method="gptq", bits=3, group_size=SIZE))
        factor = factor_hessian(stats.hessian, damping=0.01, desc_act=True, name="test")
        for share in losses:
            target = correct_inputs(weight, stats.mismatch, factor, share)
            rounded = round_gptq(target, grid, factor).dequantize()
            losses[share] += float((x @ rounded.t() - original @ weight.t()).square().sum())
    assert losses[1.0] < losses[0.25] < losses[0.0]


def test_gptq_without_act_order_goes_from_left_to_right() -> None:
    _, x = problem(0)
    order = factor_hessian(x.t() @ x, damping=0.01, desc_act=False, name="test").column_order
    assert torch.equal(order, torch.arange(INS))


def test_gptq_rounds_dead_columns_to_nearest() -> None:
    """Not to 0 nor by errors of other columns; without inputs it is rounding to nearest."""
    weight, x = problem(1)
    x[:, 5:9] = 0
    recipe = Recipe(method="gptq", bits=4, group_size=SIZE)
    grid = gptq_grid(weight, recipe)
    nearest = grid.fake_quantize(weight.view(OUTS, -1, SIZE)).flatten(1)
    for inputs, same in ((x, slice(5, 9)), (torch.zeros_like(x), slice(None))):
        shared = factor_hessian(inputs.t() @ inputs, damping=0.01, desc_act=True, name="test")
        found = round_gptq(weight, grid, shared).dequantize()
        assert torch.allclose(found[:, same], nearest[:, same])


def test_gptq_damps_more_where_the_hessian_cannot_be_factored() -> None:
    weight, x = problem(2)
    hessian = x[:3].t() @ x[:3] * 1e6  # of rank 3
    shared = factor_hessian(hessian, damping=1e-9, desc_act=True, name="test")
    grid = gptq_grid(weight, Recipe(method="gptq", group_size=SIZE))
    assert bool(round_gptq(weight, grid, shared).dequantize().isfinite().all())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("clip", [True, False])
def test_awq_equals_the_reference(seed: int, bits: int, clip: bool) -> None:
    (one, x), (other, _) = problem(seed), problem(seed + 100)
    recipe = Recipe(method="awq", bits=bits, group_size=SIZE, clip=clip)
    moments = moments_of(x, INS)
    scales = search_awq_scales(mapping("q", "k"), [one, other], moments, recipe)
    doubles = [one.double().numpy(), other.double().numpy()]
    inputs = x.double().numpy()
    wanted = reference.awq_scales(doubles, inputs, bits=bits, size=SIZE, clip=clip)
    np.testing.assert_allclose(scales.numpy(), wanted, rtol=1e-4)
    scaled = moments_of(x / scales, SIZE)
    for weight, double in zip((one, other), doubles, strict=True):
        weights = split_groups(weight * scales, SIZE)
        found = awq_grid(weights, scaled.gram_blocks, recipe).round(weights)
        rows = [
            reference.awq_row(row * wanted, inputs / wanted, bits, SIZE, clip)[0] for row in double
        ]
        assert np.array_equal(found.codes.numpy(), np.stack(rows))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_clipping_by_the_weights_alone(bits: int) -> None:
    weight, _ = problem(7)
    grid = clipped_grid(weight.double().view(OUTS, -1, SIZE), bits)
    for row in range(OUTS):
        for group in range(INS // SIZE):
            w = weight[row, group * SIZE : (group + 1) * SIZE].double().numpy()
            wanted = reference.digits_and_grid(w, reference.clipped(w, None, bits), bits)
            assert float(grid.scales[row, group]) == wanted[1]
            assert float(grid.zeros[row, group]) == wanted[2]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_search_for_scale_and_zero_point(bits: int) -> None:
    weight, _ = problem(8)
    weight = weight.double().view(OUTS, -1, SIZE)
    found = searched_grid(weight, bits)
    for row in range(OUTS):
        for group in range(INS // SIZE):
            w = weight[row, group].numpy()
            wanted = reference.digits_and_grid(w, reference.searched(w, bits), bits)
            assert float(found.scales[row, group]) == wanted[1]
            assert float(found.zeros[row, group]) == wanted[2]
    whole = full_range_grid(weight, bits)
    errors = [(grid.fake_quantize(weight) - weight).square().sum() for grid in (found, whole)]
    assert errors[0] < 0.97 * errors[1]


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_smoothquant_equals_the_reference(alpha: float) -> None:
    (one, x), (other, _) = problem(3), problem(4)
    x[:, 11] = 0
    found = smoothquant_scales(moments_of(x, SIZE).max_abs, [one, other], alpha)
    peaks = x.double().abs().amax(0)
    columns = torch.cat([one, other]).double().abs().amax(0)
    wanted = peaks**alpha / columns ** (1 - alpha)
    wanted[11] = 1.0
    assert torch.allclose(found.double(), wanted, rtol=1e-5)
    rounded = round_to_int8(one * found)
    steps = (one * found).double().abs().amax(1, keepdim=True) / 127
    assert torch.equal(rounded.values.double(), torch.round(one.double() * found / steps))


def test_moments_do_not_depend_on_batches() -> None:
    _, x = problem(5)
    once = InputStats(INS, SIZE)
    once.add(x)
    parts = moments_of(x, SIZE)
    whole = moments_of(x, INS)
    assert once.num_tokens == parts.num_tokens == TOKENS
    for name in ("sum_squares", "sum_abs", "max_abs", "gram_blocks"):
        assert torch.allclose(getattr(once, name), getattr(parts, name), rtol=1e-4, atol=1e-3)
    assert torch.allclose(whole.hessian, x.t() @ x, rtol=1e-4, atol=1e-2)
    assert torch.allclose(whole.diagonal_blocks(SIZE), once.gram_blocks, rtol=1e-4, atol=1e-2)
    assert torch.allclose(
        once.diagonal_blocks(8)[1], x[:, 8:16].t() @ x[:, 8:16], rtol=1e-4, atol=1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_wide_inputs(dtype: torch.dtype) -> None:
    """More inputs than are added at once, in two calls, with a read in between."""
    x = torch.randn(80, 1500, generator=torch.Generator().manual_seed(3)).to(dtype)
    moments = InputStats(1500, 1500)
    for part in (x[:50], x[50:]):
        moments.add(part)
        assert torch.allclose(moments.hessian, moments.hessian.t(), atol=1e-4)
    exact = x.double().t() @ x.double()
    assert (moments.hessian - exact).abs().max() < 1e-4
    assert torch.allclose(moments.sum_squares.double(), exact.diagonal())
    assert torch.allclose(moments.sum_abs, x.float().abs().sum(0))
