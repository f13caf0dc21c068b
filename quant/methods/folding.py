"""A layer with scales folded in, and not rounded yet: the first half of AWQ and SmoothQuant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tensor_names import LayerTensors
from localgen.quant.calibrate.input_stats import InputImportance, InputStats, LayerInputs
from localgen.quant.calibrate.layer_forward import LayerForward
from localgen.quant.calibrate.passes import iter_layer_stats
from localgen.quant.calibrate.scaling import ScaleMapping, fold_scales
from localgen.quant.methods.awq import search_awq_scales
from localgen.quant.methods.smoothquant import smoothquant_scales
from localgen.quant.request.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class FoldedLayer:
    """tensors: the whole layer, float32; it computes what it did before.

    gram_blocks: what AWQ clips by, for each linear whose inputs any token had: [groups, size,
    size], Σ x xᵀ. importance: for each linear. Both are of the inputs as they are now.
    """

    tensors: LayerTensors
    gram_blocks: dict[str, Tensor]
    importance: dict[str, InputImportance]


@torch.no_grad()
def fold_layer(
    spec: ModelSpec,
    index: int,
    tensors: LayerTensors,
    inputs: LayerInputs,
    forward: LayerForward,
    recipe: Recipe,
) -> FoldedLayer:
    """Layer `index` with the scales of recipe.method, awq or smoothquant, in its weights.

    The tensors given stay as they are. LoadFailed: activations that are NaN or infinite.
    """
    folded = FoldedLayer(dict(tensors), {}, {})
    for mapping, moments in iter_layer_stats(spec, index, tensors, inputs, forward, recipe):
        # weights as they came: rows that another mapping has divided are rounded the same
        weights = [tensors[f"{name}.weight"] for name in mapping.linears]
        scales = _mapping_scales(mapping, weights, moments[mapping.stats_linear], recipe)
        fold_scales(spec, folded.tensors, mapping, scales)
        for together in mapping.consumers:
            _record_statistics(folded, together, moments[together[0]], scales, recipe)
    return folded


def _mapping_scales(
    mapping: ScaleMapping, weights: list[Tensor], moments: InputStats, recipe: Recipe
) -> Tensor:
    if recipe.method == "awq":
        return search_awq_scales(mapping, weights, moments, recipe)
    # the paper smooths what comes out of norms
    if not mapping.source_is_norm:
        return torch.ones_like(moments.max_abs)
    return smoothquant_scales(moments.max_abs, weights, recipe.alpha)


def _record_statistics(
    folded: FoldedLayer,
    linears: tuple[str, ...],
    stats: InputStats,
    scales: Tensor,
    recipe: Recipe,
) -> None:
    size = recipe.group_size or len(scales)
    importance = InputImportance(stats.sum_squares / scales.square(), stats.num_tokens)
    folded.importance.update(dict.fromkeys(linears, importance))
    if recipe.method == "awq" and stats.num_tokens:
        parts = scales.view(-1, size)
        products = stats.diagonal_blocks(size) / (parts[:, :, None] * parts[:, None, :])
        folded.gram_blocks.update(dict.fromkeys(linears, products))
