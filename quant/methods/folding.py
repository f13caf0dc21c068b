"""A layer with scales folded in, and not rounded yet: the first half of AWQ and SmoothQuant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tensor_names import Tensors
from localgen.quant.calibrate.input_stats import Importance, Inputs, Moments
from localgen.quant.calibrate.layer_forward import LayerForward
from localgen.quant.calibrate.passes import observed
from localgen.quant.calibrate.scaling import Junction, fold
from localgen.quant.methods.awq import best_scales
from localgen.quant.methods.smoothquant import smoothing_scales
from localgen.quant.request.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class FoldedLayer:
    """tensors: the whole layer, float32; it computes what it did before.

    products: what AWQ clips by, for each linear whose inputs any token had: [groups, size, size],
    Σ x xᵀ. importance: for each linear. Both are of the inputs as they are now.
    """

    tensors: Tensors
    products: dict[str, Tensor]
    importance: dict[str, Importance]


@torch.no_grad()
def fold_layer(
    spec: ModelSpec,
    index: int,
    tensors: Tensors,
    inputs: Inputs,
    forward: LayerForward,
    recipe: Recipe,
) -> FoldedLayer:
    """Layer `index` with the scales of recipe.method, awq or smoothquant, in its weights.

    The tensors given stay as they are. LoadFailed: activations that are NaN or infinite.
    """
    folded = FoldedLayer(dict(tensors), {}, {})
    for junction, moments in observed(spec, index, tensors, inputs, forward, recipe):
        # weights as they came: rows that another junction has divided are rounded the same
        weights = [tensors[f"{name}.weight"] for name in junction.linears]
        scales = _scales(junction, weights, moments[junction.seen_at], recipe)
        fold(spec, folded.tensors, junction, scales)
        for together in junction.readers:
            _enter(folded, together, moments[together[0]], scales, recipe)
    return folded


def _scales(junction: Junction, weights: list[Tensor], moments: Moments, recipe: Recipe) -> Tensor:
    if recipe.method == "awq":
        return best_scales(junction, weights, moments, recipe)
    # the paper smooths what comes out of norms
    if not junction.norm:
        return torch.ones_like(moments.peaks)
    return smoothing_scales(moments.peaks, weights, recipe.alpha)


def _enter(
    folded: FoldedLayer,
    together: tuple[str, ...],
    moments: Moments,
    scales: Tensor,
    recipe: Recipe,
) -> None:
    size = recipe.group_size or len(scales)
    importance = Importance(moments.squares / scales.square(), moments.count)
    folded.importance.update(dict.fromkeys(together, importance))
    if recipe.method == "awq" and moments.count:
        parts = scales.view(-1, size)
        products = moments.blocks(size) / (parts[:, :, None] * parts[:, None, :])
        folded.products.update(dict.fromkeys(together, products))
