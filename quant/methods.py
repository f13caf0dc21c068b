"""One decoder layer quantized by whichever method a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localgen.backends.cuda.spec import ModelSpec
from localgen.backends.errors import LoadFailed
from localgen.quant.forward import LayerForward
from localgen.quant.fp8 import round_to_fp8
from localgen.quant.names import Tensors, linear_shapes
from localgen.quant.quantized import QuantizedWeight
from localgen.quant.recipe import Recipe
from localgen.quant.rtn import round_to_nearest

# a layer's input, float32 [sequences, length, hidden] at a time; each call begins again
Inputs = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """squares: float32 [in], sums of a linear's squared inputs over `count` tokens."""

    squares: Tensor
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLayer:
    """tensors: float32, all that is not quantized, by name within the layer; folded norms included.

    weights: by the name of the linear. importance: likewise, of methods that calibrate.
    """

    tensors: Tensors
    weights: dict[str, QuantizedWeight]
    importance: dict[str, Importance] = field(default_factory=dict)

    def dequantized(self) -> Tensors:
        """The whole layer in float32, as LayerForward takes it."""
        widened = {f"{name}.weight": w.dequantized() for name, w in self.weights.items()}
        return self.tensors | widened


@torch.no_grad()
def quantize_layer(
    spec: ModelSpec,
    index: int,
    tensors: Tensors,
    inputs: Inputs,
    forward: LayerForward,
    recipe: Recipe,
) -> QuantizedLayer:
    """Layer `index` as the recipe wants it. tensors: by name within the layer, as in LayerNames.

    inputs: not asked for unless the recipe calibrates. LoadFailed: NaN or infinite weights.
    """
    check_finite(index, tensors)

    def rounded(weight: Tensor) -> QuantizedWeight:
        if recipe.method == "fp8":
            return round_to_fp8(weight)
        return round_to_nearest(weight, recipe.bits, recipe.group_size)

    weights = {name: rounded(tensors[f"{name}.weight"]) for name in linear_shapes(spec)}
    return QuantizedLayer(_without(tensors, list(weights)), weights)


def check_finite(index: int, tensors: Tensors) -> None:
    """LoadFailed: the first tensor of layer `index` with a NaN or an infinity."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise LoadFailed(
                f"model.layers.{index}.{name} has NaN or infinite values: the checkpoint is "
                "damaged, download it again"
            )


def _without(tensors: Tensors, linears: list[str]) -> Tensors:
    weights = {f"{name}.weight" for name in linears}
    return {name: tensor for name, tensor in tensors.items() if name not in weights}
