"""One decoder layer quantized by whichever method a recipe names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tensor_names import LayerTensors, linear_shapes
from localgen.quant.calibrate.input_stats import InputImportance, LayerInputs
from localgen.quant.calibrate.layer_forward import LayerForward
from localgen.quant.calibrate.passes import iter_layer_stats
from localgen.quant.files.quantized_weight import QuantizedWeight
from localgen.quant.methods.awq import round_awq
from localgen.quant.methods.folding import fold_layer
from localgen.quant.methods.fp8 import round_to_fp8
from localgen.quant.methods.gptq import factor_hessian, gptq_grid, round_gptq
from localgen.quant.methods.rtn import round_to_nearest
from localgen.quant.methods.smoothquant import round_to_int8
from localgen.quant.request.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLayer:
    """tensors: float32, all that is not quantized, by name within the layer; folded norms included.

    weights: by the name of the linear. importance: likewise, of methods that calibrate.
    """

    tensors: LayerTensors
    weights: dict[str, QuantizedWeight]
    importance: dict[str, InputImportance] = field(default_factory=dict)

    def dequantize(self) -> LayerTensors:
        """The whole layer in float32, as LayerForward takes it."""
        widened = {f"{name}.weight": w.dequantize() for name, w in self.weights.items()}
        return self.tensors | widened


@torch.no_grad()
def quantize_layer(
    spec: ModelSpec,
    index: int,
    tensors: LayerTensors,
    inputs: LayerInputs,
    forward: LayerForward,
    recipe: Recipe,
) -> QuantizedLayer:
    """Layer `index` as the recipe wants it. tensors: by name within the layer, as in LayerNames.

    inputs: not asked for unless the recipe calibrates; for the least loss they come out of the
    quantized layers before. Same inputs, same result, bit for bit, on the same machine and number
    of threads. LoadFailed: NaN or infinite weights or activations.
    """
    check_finite(index, tensors)
    match recipe.method:
        case "gptq":
            return _quantize_gptq(spec, index, tensors, inputs, forward, recipe)
        case "awq" | "smoothquant":
            return _quantize_with_folded_scales(spec, index, tensors, inputs, forward, recipe)
        case "fp8":
            return _quantize_each_linear(spec, tensors, lambda _, weight: round_to_fp8(weight))
        case "rtn":
            return _quantize_each_linear(
                spec,
                tensors,
                lambda _, weight: round_to_nearest(weight, recipe.bits, recipe.group_size),
            )


def check_finite(index: int, tensors: LayerTensors) -> None:
    """LoadFailed: the first tensor of layer `index` with a NaN or an infinity."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise LoadFailed(
                f"model.layers.{index}.{name} has NaN or infinite values: the checkpoint is "
                "damaged, download it again"
            )


def _quantize_gptq(
    spec: ModelSpec,
    index: int,
    tensors: LayerTensors,
    inputs: LayerInputs,
    forward: LayerForward,
    recipe: Recipe,
) -> QuantizedLayer:
    weights: dict[str, QuantizedWeight] = {}
    importance: dict[str, InputImportance] = {}
    for mapping, moments in iter_layer_stats(spec, index, tensors, inputs, forward, recipe):
        for together in mapping.consumers:
            seen = moments[together[0]]
            where = f"model.layers.{index}.{together[0]}"
            shared = factor_hessian(
                seen.hessian, damping=recipe.damping, desc_act=recipe.desc_act, name=where
            )
            for name in together:
                weight = tensors[f"{name}.weight"]
                weights[name] = round_gptq(weight, gptq_grid(weight, recipe), shared)
                importance[name] = InputImportance(seen.sum_squares, seen.num_tokens)
    return QuantizedLayer(_unquantized_tensors(tensors, weights), weights, importance)


def _quantize_with_folded_scales(
    spec: ModelSpec,
    index: int,
    tensors: LayerTensors,
    inputs: LayerInputs,
    forward: LayerForward,
    recipe: Recipe,
) -> QuantizedLayer:
    folded = fold_layer(spec, index, tensors, inputs, forward, recipe)

    def rounded(name: str, weight: Tensor) -> QuantizedWeight:
        if recipe.method == "smoothquant":
            return round_to_int8(weight)
        return round_awq(weight, folded.gram_blocks.get(name), recipe)

    layer = _quantize_each_linear(spec, folded.tensors, rounded)
    return QuantizedLayer(layer.tensors, layer.weights, folded.importance)


def _quantize_each_linear(
    spec: ModelSpec, tensors: LayerTensors, round_weight: Callable[[str, Tensor], QuantizedWeight]
) -> QuantizedLayer:
    """Every linear by itself."""
    weights = {name: round_weight(name, tensors[f"{name}.weight"]) for name in linear_shapes(spec)}
    return QuantizedLayer(_unquantized_tensors(tensors, weights), weights)


def _unquantized_tensors(
    tensors: LayerTensors, weights: dict[str, QuantizedWeight]
) -> LayerTensors:
    taken = {f"{name}.weight" for name in weights}
    return {name: tensor for name, tensor in tensors.items() if name not in taken}
