"""Whole layers of every architecture: folding changes nothing, and every method quantizes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from cuda_models import QUANTIZABLE, make
from safetensors.torch import load_file
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.tensor_names import LayerTensors, layer_names, linear_shapes
from localgen.quant.calibrate import passes
from localgen.quant.calibrate.layer_forward import CalibrationLayer, LayerForward
from localgen.quant.calibrate.scaling import fold_scales, scale_mappings
from localgen.quant.methods.layer import QuantizedLayer, fold_layer, quantize_layer
from localgen.quant.request.recipe import QuantizeMethod, Recipe

LENGTH, INDEX = 40, 1
Case = tuple[ModelSpec, LayerTensors]
Inputs = Callable[[], Iterable[Tensor]]


@pytest.fixture(scope="module", params=QUANTIZABLE)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return built(request.param, tmp_path_factory.mktemp("model"))


def built(name: str, folder: Path) -> Case:
    make(name, folder)
    prefix = f"model.layers.{INDEX}."
    tensors = load_file(folder / "model.safetensors")
    layer = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    return read_hf_config(folder), layer


def inputs_of(spec: ModelSpec, seed: int = 0, sequences: int = 12) -> Inputs:
    """Four sequences at a time, some channels far larger than others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(
        1.5 * torch.randn(spec.hidden_size, generator=torch.Generator().manual_seed(9))
    )
    hidden = torch.randn(sequences, LENGTH, spec.hidden_size, generator=generator) * sizes
    return lambda: torch.split(hidden, 4)


def output(spec: ModelSpec, layer: LayerTensors, inputs: Inputs) -> Tensor:
    forward = LayerForward(spec, LENGTH)
    return torch.cat([forward.run(INDEX, layer, hidden) - hidden for hidden in inputs()])


def quantized(
    case: Case,
    method: QuantizeMethod,
    bits: int,
    inputs: Inputs | None = None,
    *,
    clip: bool = True,
) -> QuantizedLayer:
    spec, layer = case
    recipe = Recipe(method=method, bits=bits, group_size=8, clip=clip)
    forward = LayerForward(spec, LENGTH)
    inputs = inputs or inputs_of(spec)
    given = CalibrationLayer(INDEX, layer, inputs, forward, inputs)
    return quantize_layer(given, recipe)


def loss(case: Case, found: QuantizedLayer) -> float:
    """Loss of the outputs for inputs not in the calibration data."""
    spec, layer = case
    fresh = inputs_of(spec, seed=1)
    wanted = output(spec, layer, fresh)
    return float((output(spec, found.dequantize(), fresh) - wanted).norm() / wanted.norm())


def assert_same(spec: ModelSpec, ours: Tensor, theirs: Tensor) -> None:
    """A token or two at a near tie between two experts may take the other one."""
    differ = ~torch.isclose(ours, theirs, rtol=1e-3, atol=1e-4).all(-1)
    assert int(differ.sum()) <= (0 if spec.moe is None else 2)


def test_scales_folded_at_every_scale_mapping_change_nothing(case: Case) -> None:
    spec, layer = case
    kept = {name: tensor.clone() for name, tensor in layer.items()}
    folded = dict(layer)
    generator = torch.Generator().manual_seed(2)
    for mapping in scale_mappings(spec):
        ins = layer[f"{mapping.linears[0]}.weight"].shape[1]
        scales = mapping.average_repeats(torch.exp(torch.randn(ins, generator=generator)))
        fold_scales(spec, folded, mapping, scales)
    wanted = output(spec, layer, inputs_of(spec))
    assert_same(spec, output(spec, folded, inputs_of(spec)), wanted)
    changed = {f"{name}.weight" for name in linear_shapes(spec)}
    assert [name for name in changed if torch.equal(folded[name], layer[name])] == []
    assert [name for name in layer if not torch.equal(layer[name], kept[name])] == []


def test_every_linear_reads_one_scale_mapping(case: Case) -> None:
    spec, _ = case
    readers = [name for mapping in scale_mappings(spec) for name in mapping.linears]
    assert sorted(readers) == sorted(linear_shapes(spec))


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_a_folded_layer_computes_the_same(case: Case, method: QuantizeMethod) -> None:
    spec, layer = case
    recipe = Recipe(method=method, bits=8 if method == "smoothquant" else 4, group_size=8)
    forward = LayerForward(spec, LENGTH)
    found = fold_layer(CalibrationLayer(INDEX, layer, inputs_of(spec), forward), recipe)
    assert not torch.equal(found.tensors["input_layernorm.weight"], layer["input_layernorm.weight"])
    wanted = output(spec, layer, inputs_of(spec))
    assert_same(spec, output(spec, found.tensors, inputs_of(spec)), wanted)
    # importance is of the inputs after folding
    seen: dict[str, Tensor] = {}

    def tap(name: str, x: Tensor) -> None:
        seen[name] = seen.get(name, torch.zeros(x.shape[1])) + x.square().sum(0)

    for hidden in inputs_of(spec)():
        forward.run(INDEX, found.tensors, hidden, tap)
    assert set(found.importance) == set(linear_shapes(spec))
    for name, importance in found.importance.items():
        assert torch.allclose(importance.sum_squares, seen[name], rtol=0.05, atol=1e-3), name


def test_calibration_beats_rounding_to_nearest(case: Case) -> None:
    floor = loss(case, quantized(case, "rtn", 3, clip=False))
    assert loss(case, quantized(case, "awq", 3)) < 0.9 * floor
    assert loss(case, quantized(case, "gptq", 3)) < 0.9 * floor


@pytest.mark.parametrize("method", ["awq", "gptq", "smoothquant", "fp8", "rtn"])
def test_eight_bits_lose_little(case: Case, method: QuantizeMethod) -> None:
    found = quantized(case, method, 8)
    assert set(found.weights) == set(linear_shapes(case[0]))
    assert loss(case, found) < (0.06 if method == "fp8" else 0.04)
    calibrated = method in ("awq", "gptq", "smoothquant")
    assert set(found.importance) == (set(found.weights) if calibrated else set())


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_quantization_is_deterministic(name: str, method: QuantizeMethod, tmp_path: Path) -> None:
    case = built(name, tmp_path)
    one, other = (quantized(case, method, 4) for _ in range(2))
    assert set(one.tensors) == set(other.tensors)
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    for name in one.weights:
        assert torch.equal(one.weights[name].dequantize(), other.weights[name].dequantize())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_inputs_are_corrected_except_those_of_experts(name: str, tmp_path: Path) -> None:
    """The router may send other tokens to an expert in the original model."""
    spec, layer = built(name, tmp_path)
    forward = LayerForward(spec, LENGTH)
    exact = inputs_of(spec)

    def inputs() -> Iterable[Tensor]:
        generator = torch.Generator().manual_seed(5)
        for hidden in exact():
            yield hidden + 0.3 * hidden.std() * torch.randn(hidden.shape, generator=generator)

    def layer_of(asymmetry: float) -> QuantizedLayer:
        recipe = Recipe(method="gptq", group_size=8, asymmetry=asymmetry)
        return quantize_layer(CalibrationLayer(INDEX, layer, inputs, forward, exact), recipe)

    plain, corrected = layer_of(0.0), layer_of(0.5)
    unchanged = {
        linear
        for linear, weight in plain.weights.items()
        if torch.equal(weight.dequantize(), corrected.weights[linear].dequantize())
    }
    assert unchanged == {linear for linear in plain.weights if ".experts." in linear}
    if spec.moe is None:
        wanted = output(spec, layer, exact) + torch.cat(list(exact()))

        def error(found: QuantizedLayer) -> float:
            ran = [forward.run(INDEX, found.dequantize(), hidden) for hidden in inputs()]
            return float((torch.cat(ran) - wanted).norm())

        assert error(corrected) < error(plain)


@pytest.mark.parametrize("method", ["awq", "gptq", "smoothquant"])
def test_several_passes_equal_one(
    method: QuantizeMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = built("mixtral", tmp_path)
    recipe = Recipe(method=method, bits=8, group_size=8)
    once, bytes_once = quantized(case, method, 8), passes.statistics_bytes(case[0], recipe)
    assert len(passes.split_into_passes(case[0], recipe)) == 1
    monkeypatch.setattr(passes, "_MAX_PASS_BYTES", 1)
    assert len(passes.split_into_passes(case[0], recipe)) == len(scale_mappings(case[0])) == 7
    assert passes.statistics_bytes(case[0], recipe) < bytes_once
    apart = quantized(case, method, 8)
    for name in once.weights:
        assert torch.equal(once.weights[name].dequantize(), apart.weights[name].dequantize())


@pytest.mark.parametrize("method", ["awq", "gptq", "smoothquant"])
def test_experts_that_no_token_reaches_are_rounded_all_the_same(
    method: QuantizeMethod, tmp_path: Path
) -> None:
    case = built("qwen3 moe", tmp_path)
    one = torch.randn(1, 1, case[0].hidden_size, generator=torch.Generator().manual_seed(0))
    found = quantized(case, method, 8, lambda: [one])
    counts = {importance.num_tokens for importance in found.importance.values()}
    assert counts == {0, 1}
    for name, weight in found.weights.items():
        if found.importance[name].num_tokens:
            continue
        folded = case[1][f"{name}.weight"]
        if method == "gptq":
            assert (weight.dequantize() - folded).norm() < 0.02 * folded.norm()
        assert bool(weight.dequantize().isfinite().all())
        assert weight.dequantize().norm() > 0


def test_nan_activations_are_rejected(tmp_path: Path) -> None:
    case = built("llama", tmp_path)
    bad = torch.full((1, 4, case[0].hidden_size), torch.inf)
    with pytest.raises(LoadFailed, match=rf"model\.layers\.{INDEX}\.self_attn\.q_proj sees NaN"):
        quantized(case, "gptq", 4, lambda: [bad])


def test_the_router_is_not_quantized_but_folded(tmp_path: Path) -> None:
    spec, layer = case = built("mixtral", tmp_path)
    router = f"{layer_names(spec).router}.weight"
    found = quantized(case, "awq", 4)
    assert found.tensors[router].shape == layer[router].shape
    assert not torch.equal(found.tensors[router], layer[router])
