"""Rounding learned from a layer's output: it never loses, keeps its grid, and follows gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from cuda_models import QUANTIZABLE, make
from safetensors.torch import load_file
from torch import Tensor

from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.tensor_names import LayerTensors
from localgen.quant.calibrate.layer_forward import CalibrationLayer, LayerForward
from localgen.quant.files.packing import GgufWeight, GroupedWeight, QuantizedWeight
from localgen.quant.gguf.code_bits import group_grids
from localgen.quant.gguf.coded_weight import CodedWeight
from localgen.quant.gguf.ggml_rounding import fits_rows
from localgen.quant.methods.grid import full_range_grid, split_groups
from localgen.quant.methods.layer import QuantizedLayer, gptq_targets, quantize_layer
from localgen.quant.methods.learned_rounding import LearnedGroups, learn_rounding
from localgen.quant.request.recipe import CalibrationConfig, QuantizeMethod, Recipe
from localgen.quant.request.request import QuantizeRequest

INDEX, LENGTH, GROUP = 1, 24, 8


def layer_of(name: str, folder: Path) -> tuple[CalibrationLayer, Tensor]:
    """A layer of a random model whose inputs differ from the original's, and its target."""
    make(name, folder)
    prefix = f"model.layers.{INDEX}."
    tensors = load_file(folder / "model.safetensors")
    layer: LayerTensors = {
        n.removeprefix(prefix): t.float() for n, t in tensors.items() if n.startswith(prefix)
    }
    forward = LayerForward(read_hf_config(folder), LENGTH)
    generator = torch.Generator().manual_seed(0)
    originals = torch.randn(8, LENGTH, forward.spec.hidden_size, generator=generator)
    inputs = originals + 0.1 * torch.randn(originals.shape, generator=generator)
    target = forward.run(INDEX, layer, originals)
    found = CalibrationLayer(
        INDEX,
        layer,
        lambda: torch.split(inputs, 4),
        forward,
        lambda: torch.split(originals, 4),
        lambda: torch.split(target, 4),
    )
    return found, target


def loss(layer: CalibrationLayer, target: Tensor, found: QuantizedLayer) -> float:
    whole = found.dequantize()
    outputs = [layer.forward.run(INDEX, whole, hidden) for hidden in layer.inputs()]
    return float((torch.cat(outputs) - target).square().mean())


@pytest.mark.parametrize("name", QUANTIZABLE)
@pytest.mark.parametrize(("method", "bits"), [("gptq", 2), ("gptq", 3), ("awq", 2), ("awq", 3)])
def test_learned_rounding_is_closer_to_the_original(
    name: str, method: QuantizeMethod, bits: int, tmp_path: Path
) -> None:
    layer, target = layer_of(name, tmp_path)
    plain = Recipe(method=method, bits=bits, group_size=GROUP)
    learned = replace(plain, rounding_steps=24)
    before = loss(layer, target, quantize_layer(layer, plain))
    found = quantize_layer(layer, learned)
    assert loss(layer, target, found) < 0.99 * before
    again = quantize_layer(layer, learned)
    for linear, weight in found.weights.items():
        assert isinstance(weight, GroupedWeight)
        assert int(weight.codes.max()) < 2**bits
        assert torch.equal(weight.scales, weight.scales.half().float())
        assert bits != 3 or bool((weight.zeros == 4).all())
        assert torch.equal(weight.dequantize(), again.weights[linear].dequantize())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_codes_of_a_gguf_type_are_learned(name: str, tmp_path: Path) -> None:
    """Rows of q and k are in another order in a file, and gemma2's q has a factor."""
    layer, target = layer_of(name, tmp_path)
    coded = {
        one.linear: CodedWeight(
            layer.spec,
            one.linear.rpartition(".")[2],
            "Q4_0",
            one.target,
            mean_squares=None,
            factor=one.factor,
        )
        for one in gptq_targets(layer, Recipe(method="gptq", group_size=None))
        if fits_rows("Q4_0", one.target.shape[1])
    }
    start = {linear: one.round() for linear, one in coded.items()}
    found = learn_rounding(layer, coded, steps=24)
    first, last = (
        loss(layer, target, QuantizedLayer(layer.tensors, dict(weights)))
        for weights in (start, found)
    )
    assert last < 0.99 * first
    for linear, weight in found.items():
        assert isinstance(weight, GgufWeight)
        for before, after in zip(
            group_grids(start[linear].packed.numpy(), "Q4_0"),
            group_grids(weight.packed.numpy(), "Q4_0"),
            strict=True,
        ):
            assert np.array_equal(before, after)
        # ggml multiplies in another order
        assert torch.allclose(coded[linear].values(), weight.dequantize(), atol=1e-6)


def test_weights_that_lose_nothing_stay(tmp_path: Path) -> None:
    layer, _ = layer_of("llama", tmp_path)
    name = "mlp.up_proj"
    grid = full_range_grid(split_groups(layer.weight(name), GROUP), 2)
    exact = grid.fake_quantize(split_groups(layer.weight(name), GROUP)).flatten(1)
    tensors = layer.tensors | {f"{name}.weight": exact}
    targets = [layer.forward.run(INDEX, tensors, hidden) for hidden in layer.inputs()]
    given = CalibrationLayer(
        INDEX, tensors, layer.inputs, layer.forward, layer.inputs, lambda: targets
    )
    found = learn_rounding(given, {name: LearnedGroups(exact, grid)}, steps=8)
    assert torch.equal(found[name].dequantize(), exact)


def test_smaller_steps_come_closer(tmp_path: Path) -> None:
    """From nearest values of one linear, with all others exact."""
    layer, _ = layer_of("llama", tmp_path)
    name = "mlp.up_proj"
    weight = layer.weight(name)
    grid = full_range_grid(split_groups(weight, GROUP), 2)
    target = [layer.forward.run(INDEX, layer.tensors, hidden) for hidden in layer.inputs()]
    given = CalibrationLayer(
        INDEX, layer.tensors, layer.inputs, layer.forward, layer.inputs, lambda: target
    )

    def error(found: QuantizedWeight) -> float:
        tensors = layer.tensors | {f"{name}.weight": found.dequantize()}
        outputs = [layer.forward.run(INDEX, tensors, hidden) for hidden in layer.inputs()]
        return float((torch.cat(outputs) - torch.cat(target)).square().mean())

    nearest = grid.round(split_groups(weight, GROUP))
    few, many = (
        error(learn_rounding(given, {name: LearnedGroups(weight, grid)}, steps)[name])
        for steps in (4, 64)
    )
    assert many < few <= error(nearest)
    assert many < 0.95 * error(nearest)


def test_few_bits_learn_their_rounding_by_default() -> None:
    asked = QuantizeRequest(
        model="tiny", calibration=CalibrationConfig(), output=None, resume=False, eval_set=None
    )

    def steps(bits: int, given: int | None = None, method: QuantizeMethod = "gptq") -> int:
        found = asked.with_method([method], bits=bits, rounding_steps=given, calibrate=False)
        assert found.recipe is not None
        return found.recipe.rounding_steps

    assert [steps(bits) for bits in (2, 3, 4, 8)] == [200, 200, 0, 0]
    assert [steps(bits, method="awq") for bits in (2, 3, 4)] == [200, 200, 50]
    assert [steps(2, method="rtn"), steps(2, 0), steps(8, 70)] == [0, 0, 70]
