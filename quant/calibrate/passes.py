"""Statistics of a layer in as many passes over the calibration text as memory requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tensor_names import linear_shapes
from localgen.quant.calibrate.input_stats import InputStats, collect_input_stats
from localgen.quant.calibrate.layer_forward import CalibrationLayer
from localgen.quant.calibrate.scaling import ScaleMapping, scale_mappings
from localgen.quant.request.recipe import Recipe

# limit for the statistics of one pass; those of a single mapping may exceed it
_MAX_PASS_BYTES = 4 << 30


def iter_layer_stats(
    layer: CalibrationLayer, recipe: Recipe
) -> Iterator[tuple[ScaleMapping, dict[str, InputStats]]]:
    """Each scale mapping of the layer with the statistics that recipe.method needs.

    InputStats are by the name of the linear: of stats_linear, and of the first linear of each
    group of consumers. Raises LoadFailed for NaN or infinite activations.
    """
    spec = layer.spec
    device = layer.weight(scale_mappings(spec)[0].source).device
    for mappings in split_into_passes(spec, recipe):
        stats = {
            name: InputStats(
                _num_inputs(spec, mapping),
                block,
                device,
                with_mismatch=_needs_mismatch(mapping, recipe),
            )
            for mapping in mappings
            for name, block in _gram_block_sizes(spec, mapping, recipe).items()
        }
        collect_input_stats(layer, stats)
        for mapping in mappings:
            yield mapping, {name: stats[name] for name in _gram_block_sizes(spec, mapping, recipe)}


def split_into_passes(spec: ModelSpec, recipe: Recipe) -> list[list[ScaleMapping]]:
    """Scale mappings of a layer, grouped by pass over the calibration text."""
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
    """Peak memory of the statistics of one pass."""
    if not recipe.needs_calibration:
        return 0
    return max(
        sum(_stats_bytes(spec, mapping, recipe) for mapping in mappings)
        for mappings in split_into_passes(spec, recipe)
    )


def paired_inputs_bytes(spec: ModelSpec, recipe: Recipe, num_tokens: int) -> int:
    """Memory for the inputs of linears in the original model, of a batch of num_tokens tokens."""
    if not recipe.is_asymmetric:
        return 0
    mappings = [one for one in scale_mappings(spec) if _needs_mismatch(one, recipe)]
    return 4 * num_tokens * sum(_num_inputs(spec, mapping) for mapping in mappings)


def gptq_factor_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """Memory for gptq's largest damped Hessian and its factor; 0 for other methods."""
    if recipe.method != "gptq":
        return 0
    return 2 * 4 * max(_num_inputs(spec, mapping) for mapping in scale_mappings(spec)) ** 2


def _gram_block_sizes(
    spec: ModelSpec, mapping: ScaleMapping, recipe: Recipe
) -> Mapping[str, int | None]:
    """Linears to collect statistics of, and the block size of their Gram blocks."""
    ins = _num_inputs(spec, mapping)
    firsts = [linears[0] for linears in mapping.consumers]
    match recipe.method:
        case "gptq":
            return dict.fromkeys(firsts, ins)
        case "awq":
            groups = dict.fromkeys(firsts, recipe.group_size or ins)
            return {**groups, mapping.stats_linear: ins}
    return dict.fromkeys([*firsts, mapping.stats_linear])


def _needs_mismatch(mapping: ScaleMapping, recipe: Recipe) -> bool:
    """An expert's tokens in the original model may be others, so its inputs have no pairs."""
    return recipe.is_asymmetric and not mapping.is_routed


def _num_inputs(spec: ModelSpec, mapping: ScaleMapping) -> int:
    return linear_shapes(spec)[mapping.linears[0]][1]


def _stats_bytes(spec: ModelSpec, mapping: ScaleMapping, recipe: Recipe) -> int:
    ins = _num_inputs(spec, mapping)
    blocks = _gram_block_sizes(spec, mapping, recipe).values()
    mismatch = ins if _needs_mismatch(mapping, recipe) else 0
    return sum(4 * ins * ((block or 0) + mismatch + 3) for block in blocks)
