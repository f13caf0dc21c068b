"""How often a layer is run, so that what is summed up of its inputs stays within memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tensor_names import Tensors, linear_shapes
from localgen.quant.calibrate.input_stats import Inputs, Moments, observe
from localgen.quant.calibrate.layer_forward import LayerForward
from localgen.quant.calibrate.scaling import Junction, junctions
from localgen.quant.request.recipe import Recipe

# what the sums of one pass may take; those of a single junction may exceed it
_PASS_BYTES = 4 << 30


def observed(
    spec: ModelSpec,
    index: int,
    tensors: Tensors,
    inputs: Inputs,
    forward: LayerForward,
    recipe: Recipe,
) -> Iterator[tuple[Junction, dict[str, Moments]]]:
    """Each junction of layer `index` with what recipe.method wants to know of it.

    Moments are by the name of the linear: at seen_at, and at the first of those that see the
    same tokens. All are of the layer as given. LoadFailed: NaN or infinite activations.
    """
    device = tensors[f"{junctions(spec)[0].source}.weight"].device
    for together in passes(spec, recipe):
        wanted = {
            name: Moments(_ins(spec, junction), block, device)
            for junction in together
            for name, block in _blocks(spec, junction, recipe).items()
        }
        observe(forward, index, tensors, inputs, wanted)
        for junction in together:
            yield junction, {name: wanted[name] for name in _blocks(spec, junction, recipe)}


def passes(spec: ModelSpec, recipe: Recipe) -> list[list[Junction]]:
    """The junctions of a layer by the pass over the calibration text that watches them."""
    found: list[list[Junction]] = []
    left = 0
    for junction in junctions(spec):
        size = _num_bytes(spec, junction, recipe)
        if not found or size > left:
            found.append([])
            left = _PASS_BYTES
        found[-1].append(junction)
        left -= size
    return found


def statistics_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """The most that the sums of a pass take."""
    if not recipe.calibrated:
        return 0
    return max(
        sum(_num_bytes(spec, junction, recipe) for junction in together)
        for together in passes(spec, recipe)
    )


def derived_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """What is worked out of the largest sums: for gptq the Hessian damped, and its factor."""
    if recipe.method != "gptq":
        return 0
    return 2 * 4 * max(_ins(spec, junction) for junction in junctions(spec)) ** 2


def _blocks(spec: ModelSpec, junction: Junction, recipe: Recipe) -> Mapping[str, int | None]:
    """The linears to watch, and in what blocks of inputs."""
    ins = _ins(spec, junction)
    firsts = [together[0] for together in junction.readers]
    match recipe.method:
        case "gptq":
            return dict.fromkeys(firsts, ins)
        case "awq":
            groups = dict.fromkeys(firsts, recipe.group_size or ins)
            return {**groups, junction.seen_at: ins}
    return dict.fromkeys([*firsts, junction.seen_at])


def _ins(spec: ModelSpec, junction: Junction) -> int:
    return linear_shapes(spec)[junction.linears[0]][1]


def _num_bytes(spec: ModelSpec, junction: Junction, recipe: Recipe) -> int:
    ins = _ins(spec, junction)
    blocks = _blocks(spec, junction, recipe).values()
    return sum(4 * ins * ((block or 0) + 3) for block in blocks)
