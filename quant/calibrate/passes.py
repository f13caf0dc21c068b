"""How often a layer is run, so that what is summed up of its inputs stays within memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tensor_names import LayerTensors, linear_shapes
from localgen.quant.calibrate.input_stats import InputStats, LayerInputs, collect_input_stats
from localgen.quant.calibrate.layer_forward import LayerForward
from localgen.quant.calibrate.scaling import ScaleMapping, scale_mappings
from localgen.quant.request.recipe import Recipe

# what the sums of one pass may take; those of a single mapping may exceed it
_MAX_PASS_BYTES = 4 << 30


def iter_layer_stats(
    spec: ModelSpec,
    index: int,
    tensors: LayerTensors,
    inputs: LayerInputs,
    forward: LayerForward,
    recipe: Recipe,
) -> Iterator[tuple[ScaleMapping, dict[str, InputStats]]]:
    """Each scale mapping of layer `index` with what recipe.method wants to know of it.

    InputStats are by the name of the linear: at stats_linear, and at the first of those that see
    the same tokens. All are of the layer as given. LoadFailed: NaN or infinite activations.
    """
    device = tensors[f"{scale_mappings(spec)[0].source}.weight"].device
    for together in split_into_passes(spec, recipe):
        wanted = {
            name: InputStats(_num_inputs(spec, mapping), block, device)
            for mapping in together
            for name, block in _gram_block_sizes(spec, mapping, recipe).items()
        }
        collect_input_stats(forward, index, tensors, inputs, wanted)
        for mapping in together:
            yield (
                mapping,
                {name: wanted[name] for name in _gram_block_sizes(spec, mapping, recipe)},
            )


def split_into_passes(spec: ModelSpec, recipe: Recipe) -> list[list[ScaleMapping]]:
    """The scale mappings of a layer by the pass over the calibration text that watches them."""
    found: list[list[ScaleMapping]] = []
    left = 0
    for mapping in scale_mappings(spec):
        size = _stats_bytes(spec, mapping, recipe)
        if not found or size > left:
            found.append([])
            left = _MAX_PASS_BYTES
        found[-1].append(mapping)
        left -= size
    return found


def statistics_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """The most that the sums of a pass take."""
    if not recipe.needs_calibration:
        return 0
    return max(
        sum(_stats_bytes(spec, mapping, recipe) for mapping in together)
        for together in split_into_passes(spec, recipe)
    )


def gptq_factor_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """What is worked out of the largest sums: for gptq the Hessian damped, and its factor."""
    if recipe.method != "gptq":
        return 0
    return 2 * 4 * max(_num_inputs(spec, mapping) for mapping in scale_mappings(spec)) ** 2


def _gram_block_sizes(
    spec: ModelSpec, mapping: ScaleMapping, recipe: Recipe
) -> Mapping[str, int | None]:
    """The linears to watch, and in what blocks of inputs."""
    ins = _num_inputs(spec, mapping)
    firsts = [together[0] for together in mapping.consumers]
    match recipe.method:
        case "gptq":
            return dict.fromkeys(firsts, ins)
        case "awq":
            groups = dict.fromkeys(firsts, recipe.group_size or ins)
            return {**groups, mapping.stats_linear: ins}
    return dict.fromkeys([*firsts, mapping.stats_linear])


def _num_inputs(spec: ModelSpec, mapping: ScaleMapping) -> int:
    return linear_shapes(spec)[mapping.linears[0]][1]


def _stats_bytes(spec: ModelSpec, mapping: ScaleMapping, recipe: Recipe) -> int:
    ins = _num_inputs(spec, mapping)
    blocks = _gram_block_sizes(spec, mapping, recipe).values()
    return sum(4 * ins * ((block or 0) + 3) for block in blocks)
