"""Quantization of one decoder layer by the method of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.hf.tensor_names import LayerTensors, linear_shapes
from localgen.quant.calibrate.importance import InputImportance
from localgen.quant.calibrate.input_stats import InputStats
from localgen.quant.calibrate.layer_forward import CalibrationLayer
from localgen.quant.calibrate.passes import iter_layer_stats
from localgen.quant.calibrate.scaling import ScaleMapping, fold_scales
from localgen.quant.files.packing import GroupedWeight, QuantizedWeight
from localgen.quant.methods.awq import awq_grid, scaled_blocks, search_awq_scales
from localgen.quant.methods.gptq import (
    HessianFactor,
    compensate_errors,
    correct_inputs,
    factor_hessian,
    gptq_grid,
    round_gptq,
)
from localgen.quant.methods.grid import round_to_nearest, split_groups
from localgen.quant.methods.learned_rounding import LearnedGroups, learn_rounding
from localgen.quant.methods.w8a8 import round_to_fp8, round_to_int8, smoothquant_scales
from localgen.quant.request.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLayer:
    """tensors: float32, all unquantized tensors by name within the layer, with scales folded in.

    weights: by the name of the linear. importance: likewise; empty for methods without calibration.
    """

    tensors: LayerTensors
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    importance: dict[str, InputImportance] = field(default_factory=dict)

    def dequantize(self) -> LayerTensors:
        """The whole layer in float32, as for LayerForward."""
        dequantized = {f"{name}.weight": one.dequantize() for name, one in self.weights.items()}
        return self.tensors | dequantized


@dataclass(frozen=True, slots=True, eq=False)
class FoldedLayer:
    """A layer with scales folded in, not rounded yet. tensors: the whole layer, float32.

    gram_blocks: for AWQ's clipping, [groups, size, size], Σ x xᵀ by linear; only of linears that
    got tokens. importance: by linear. Both are of the scaled inputs.
    """

    tensors: LayerTensors
    gram_blocks: dict[str, Tensor] = field(default_factory=dict)
    importance: dict[str, InputImportance] = field(default_factory=dict)


@torch.no_grad()
def quantize_layer(layer: CalibrationLayer, recipe: Recipe) -> QuantizedLayer:
    """Quantize all linears of a layer.

    The same inputs give the same bits on the same machine with the same number of threads. Raises
    LoadFailed for NaN or infinite weights or activations.
    """
    _check_finite(layer)
    match recipe.method:
        case "gptq":
            return _quantize_gptq(layer, recipe)
        case "awq":
            return _quantize_awq(layer, recipe)
        case "smoothquant":
            folded = fold_layer(layer, recipe)
            scaled = replace(layer, tensors=folded.tensors)
            found = _quantize_each_linear(scaled, lambda _, weight: round_to_int8(weight))
            return replace(found, importance=folded.importance)
        case "fp8":
            return _quantize_each_linear(layer, lambda _, weight: round_to_fp8(weight))
        case "rtn":
            return _quantize_each_linear(
                layer,
                lambda _, weight: round_to_nearest(
                    weight, recipe.bits, recipe.group_size, clip=recipe.clip
                ),
            )


@torch.no_grad()
def fold_layer(layer: CalibrationLayer, recipe: Recipe) -> FoldedLayer:
    """Fold the scales of recipe.method, awq or smoothquant, into a copy of the layer's weights.

    Raises LoadFailed for NaN or infinite activations.
    """
    folded = FoldedLayer(dict(layer.tensors))
    for mapping, stats in iter_layer_stats(layer, recipe):
        # original weights: rows that another mapping has divided are rounded the same
        weights = [layer.weight(name) for name in mapping.linears]
        scales = _mapping_scales(mapping, weights, stats[mapping.stats_linear], recipe)
        fold_scales(layer.spec, folded.tensors, mapping, scales)
        for linears in mapping.consumers:
            _record_statistics(folded, linears, stats[linears[0]], scales, recipe)
    return folded


def _mapping_scales(
    mapping: ScaleMapping, weights: list[Tensor], stats: InputStats, recipe: Recipe
) -> Tensor:
    if recipe.method == "awq":
        return search_awq_scales(mapping, weights, stats, recipe)
    # the paper smooths the outputs of norms only
    if not mapping.source_is_norm:
        return torch.ones_like(stats.max_abs)
    return smoothquant_scales(stats.max_abs, weights, recipe.alpha)


def _record_statistics(
    folded: FoldedLayer,
    linears: tuple[str, ...],
    stats: InputStats,
    scales: Tensor,
    recipe: Recipe,
) -> None:
    importance = InputImportance(stats.sum_squares / scales.square(), stats.num_tokens)
    folded.importance.update(dict.fromkeys(linears, importance))
    if recipe.method == "awq" and stats.num_tokens:
        size = recipe.group_size or len(scales)
        blocks = scaled_blocks(stats.diagonal_blocks(size), scales)
        folded.gram_blocks.update(dict.fromkeys(linears, blocks))


def _check_finite(layer: CalibrationLayer) -> None:
    for name, tensor in layer.tensors.items():
        if not tensor.isfinite().all():
            raise LoadFailed(
                f"{layer.full_name(name)} has NaN or infinite values: the checkpoint is "
                "damaged, download it again"
            )


@dataclass(frozen=True, slots=True, eq=False)
class GptqTarget:
    """A linear to round by GPTQ. target: its weight [out, in] after the correction of its inputs.

    importance: of its inputs in the model whose layers before are quantized.
    """

    linear: str
    target: Tensor
    factor: HessianFactor
    importance: InputImportance


def gptq_targets(layer: CalibrationLayer, recipe: Recipe) -> Iterator[GptqTarget]:
    """All linears of a layer. Raises LoadFailed as quantize_layer."""
    for mapping, stats in iter_layer_stats(layer, recipe):
        for linears in mapping.consumers:
            seen = stats[linears[0]]
            factor = factor_hessian(
                seen.hessian,
                damping=recipe.damping,
                desc_act=recipe.desc_act,
                name=layer.full_name(linears[0]),
            )
            importance = InputImportance(seen.sum_squares, seen.num_tokens)
            for name in linears:
                target = layer.weight(name)
                if seen.mismatch is not None:
                    target = correct_inputs(target, seen.mismatch, factor, recipe.asymmetry)
                yield GptqTarget(name, target, factor, importance)


def _quantize_gptq(layer: CalibrationLayer, recipe: Recipe) -> QuantizedLayer:
    weights: dict[str, QuantizedWeight] = {}
    learned: dict[str, LearnedGroups] = {}
    importance: dict[str, InputImportance] = {}
    for one in gptq_targets(layer, recipe):
        grid = gptq_grid(layer.weight(one.linear), recipe)
        if recipe.rounding_steps:
            compensated = compensate_errors(one.target, grid, one.factor)
            learned[one.linear] = LearnedGroups(compensated, grid)
        else:
            weights[one.linear] = round_gptq(one.target, grid, one.factor)
        importance[one.linear] = one.importance
    del one  # learning needs the memory of its factor
    if recipe.rounding_steps:
        weights.update(learn_rounding(layer, learned, recipe.rounding_steps))
    return QuantizedLayer(unquantized_tensors(layer.tensors, weights), weights, importance)


def _quantize_awq(layer: CalibrationLayer, recipe: Recipe) -> QuantizedLayer:
    folded = fold_layer(layer, recipe)
    scaled = replace(layer, tensors=folded.tensors)
    learned: dict[str, LearnedGroups] = {}

    def rounded(name: str, weight: Tensor) -> GroupedWeight:
        weights = split_groups(weight, recipe.group_size)
        grid = awq_grid(weights, folded.gram_blocks.get(name), recipe)
        if recipe.rounding_steps:
            learned[name] = LearnedGroups(weight, grid)
        return grid.round(weights)

    found = _quantize_each_linear(scaled, rounded)
    if recipe.rounding_steps:
        found.weights.update(learn_rounding(scaled, learned, recipe.rounding_steps))
    return replace(found, importance=folded.importance)


def _quantize_each_linear(
    layer: CalibrationLayer, round_weight: Callable[[str, Tensor], QuantizedWeight]
) -> QuantizedLayer:
    weights = {name: round_weight(name, layer.weight(name)) for name in linear_shapes(layer.spec)}
    return QuantizedLayer(unquantized_tensors(layer.tensors, weights), weights)


def unquantized_tensors(
    tensors: LayerTensors, weights: Mapping[str, QuantizedWeight]
) -> LayerTensors:
    """The tensors of a layer without those of the linears in `weights`."""
    taken = {f"{name}.weight" for name in weights}
    return {name: tensor for name, tensor in tensors.items() if name not in taken}
