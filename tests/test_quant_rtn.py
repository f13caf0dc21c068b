"""Rounding to nearest and FP8: resulting values, and rejected input."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from cuda_configs import write_config
from torch import Tensor

from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.tensor_names import LayerTensors, linear_shapes
from localgen.quant.calibrate.layer_forward import CalibrationLayer, LayerForward
from localgen.quant.files.packing import is_symmetric
from localgen.quant.methods.grid import round_to_nearest
from localgen.quant.methods.layer import quantize_layer
from localgen.quant.methods.w8a8 import round_to_fp8
from localgen.quant.preflight import check_group_size
from localgen.quant.request.recipe import QuantizeMethod, Recipe


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(folder: Path) -> LayerTensors:
    spec = read_hf_config(folder)
    layer = {f"{name}.weight": random(*shape) for name, shape in linear_shapes(spec).items()}
    return layer | {"input_layernorm.weight": torch.ones(spec.hidden_size)}


def nothing() -> Iterable[Tensor]:
    raise AssertionError("this method does not look at activations")


def min_max(weights: Tensor, bits: int) -> Tensor:
    """Textbook min-max over the last dimension: 2 ** bits - 1 steps, around 0 except in 4 bits."""
    low, high = weights.amin(-1, keepdim=True), weights.amax(-1, keepdim=True)
    if is_symmetric(bits):
        middle, sign = 2 ** (bits - 1), torch.where(high > -low, -1.0, 1.0)
        longer, shorter = torch.maximum(-low, high), torch.minimum(-low, high)
        step = sign * torch.maximum(longer / middle, shorter / (middle - 1)).half().double()
        return torch.mul(torch.clamp((weights / step).round(), -middle, middle - 1), step)
    step = ((high - low) / (2**bits - 1)).half().double()
    zero = (-low / step).round()
    digits = torch.clamp((weights / step).round() + zero, 0, 2**bits - 1)
    return torch.mul(digits - zero, step)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [16, None])
def test_every_weight_goes_to_the_nearest_value_of_a_grid_no_worse_than_min_and_max(
    bits: int, group_size: int | None
) -> None:
    weight = random(24, 64)
    found = round_to_nearest(weight, bits, group_size)
    assert found.scales.shape == (24, 4 if group_size else 1)
    assert int(found.codes.max()) < 2**bits
    if is_symmetric(bits):
        assert bool((found.zeros == 2 ** (bits - 1)).all())
    steps = found.scales.abs().repeat_interleave(group_size or 64, 1)
    inside = (found.codes > 0) & (found.codes < 2**bits - 1)
    error = (found.dequantize() - weight).abs()
    assert bool((error <= steps * 0.5001)[inside].all())
    size = group_size or 64
    plain = min_max(weight.double().view(24, -1, size), bits).flatten(1)
    per_group = error.square().view(24, -1, size).sum(-1)
    wanted = (plain - weight).square().view(24, -1, size).sum(-1)
    assert bool((per_group <= wanted * 1.0001).all())


def test_scales_are_values_of_float16() -> None:
    scales = round_to_nearest(random(8, 64) * 1e-3, 4, 32).scales
    assert torch.equal(scales, scales.half().float())


@pytest.mark.parametrize(
    "weight", [torch.zeros(2, 16), torch.full((2, 16), 0.7), -random(2, 16).abs()]
)
def test_groups_of_one_sign_keep_zero_exact(weight: Tensor) -> None:
    """All zero, all positive, all negative: zero is exact, the rest within a step."""
    found = round_to_nearest(weight, 4, 16)
    assert bool(found.dequantize()[weight == 0].eq(0).all())
    assert bool(((found.dequantize() - weight).abs() <= found.scales * 0.501).all())


def test_tiny_weights_do_not_become_nan() -> None:
    found = round_to_nearest(torch.full((1, 8), 1e-12), 4, 8)
    assert bool(found.dequantize().isfinite().all())


@pytest.mark.parametrize(("method", "bits"), [("rtn", 4), ("rtn", 8), ("fp8", 8)])
def test_a_layer_keeps_all_but_its_linears(
    method: QuantizeMethod, bits: int, tmp_path: Path
) -> None:
    spec = read_hf_config(write_config(tmp_path, "llama"))
    layer = layer_of(tmp_path)
    recipe = Recipe(method=method, bits=bits, group_size=16)
    found = quantize_layer(CalibrationLayer(0, layer, nothing, LayerForward(spec, 8)), recipe)
    assert set(found.tensors) == {"input_layernorm.weight"}
    assert set(found.weights) == set(linear_shapes(spec))
    assert set(found.dequantize()) == set(layer)
    for name, tensor in found.dequantize().items():
        assert (tensor - layer[name]).norm() < 0.15 * layer[name].norm()


def test_fp8_rows_keep_their_greatest() -> None:
    weight = random(6, 32) * torch.tensor([1e-30, 1.0, 1e-4, 1e3, 5.0, 0.0])[:, None]
    found = round_to_fp8(weight).dequantize()
    top = weight.abs().amax(1)
    assert torch.allclose(found.abs().amax(1), top, rtol=1e-5, atol=0)
    assert bool(((found - weight).abs().amax(1) <= top * 2**-4).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    spec = read_hf_config(write_config(tmp_path, "llama"))
    layer = layer_of(tmp_path)
    layer["mlp.up_proj.weight"][3, 5] = value
    with pytest.raises(LoadFailed, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        quantize_layer(
            CalibrationLayer(2, layer, nothing, LayerForward(spec, 8)),
            Recipe(method="fp8", bits=8),
        )


def test_a_group_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    spec = read_hf_config(write_config(tmp_path, "llama"))
    with pytest.raises(InvalidRequest, match=r"mlp\.down_proj has 48 inputs.*--group-size 16 or 8"):
        check_group_size(spec, Recipe(method="gptq", group_size=32))
    for fits in (Recipe(method="rtn", group_size=16), Recipe(method="awq", group_size=None)):
        check_group_size(spec, fits)
    check_group_size(spec, Recipe(method="fp8", bits=8))
