"""What a quantization will take, before it starts: memory, disk, and the size of its result."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from localgen.backends.formats.hf.tensor_names import linear_shapes
from localgen.quant.calibrate.passes import derived_bytes, statistics_bytes
from localgen.quant.calibrate.scaling import junctions
from localgen.quant.files.packing import layout_of
from localgen.quant.preflight import Ready
from localgen.quant.request.recipe import Mode, Recipe

_BATCH_TOKENS = 2048
_COPIES = 4


@dataclass(frozen=True, slots=True)
class Estimate:
    """peak_bytes: of the whole process, on the host. disk_bytes: most that lies there at once.

    output_bytes: of the result's weights. states_bytes: activations of all windows, before one
    layer. batch: windows that go through a layer together.
    """

    peak_bytes: int
    disk_bytes: int
    output_bytes: int
    states_bytes: int
    batch: int


def estimate(ready: Ready, mode: Mode = "round") -> Estimate:
    """mode: as of Job."""
    spec = ready.source.spec
    states = 0
    if ready.windows is not None:
        states = 4 * spec.hidden * ready.windows.ids.numel()
    output = _written_bytes(ready, mode)
    batch = max(1, _BATCH_TOKENS // ready.length)
    return Estimate(
        peak_bytes=psutil.Process().memory_info().rss + working_bytes(ready, batch),
        disk_bytes=output + 2 * states,
        output_bytes=output,
        states_bytes=states,
        batch=batch,
    )


def _written_bytes(ready: Ready, mode: Mode) -> int:
    match mode:
        case "round":
            return output_bytes(ready)
        case "fold":
            return plain_bytes(ready)
        case "observe":
            return 0


def output_bytes(ready: Ready) -> int:
    """Of the result's tensors."""
    spec = ready.source.spec
    shapes = linear_shapes(spec)
    packed = spec.layers * sum(packed_bytes(ready.recipe, *shape) for shape in shapes.values())
    plain = spec.num_params - spec.layers * sum(outs * ins for outs, ins in shapes.values())
    norms = spec.layers * 4 * spec.hidden + spec.hidden
    return packed + (plain + norms) * ready.dtype.itemsize


def plain_bytes(ready: Ready) -> int:
    """Of the layers without rounding."""
    spec = ready.source.spec
    shapes = linear_shapes(spec).values()
    return spec.layers * sum(outs * ins for outs, ins in shapes) * ready.dtype.itemsize


def packed_bytes(recipe: Recipe, outs: int, ins: int) -> int:
    """Of one linear."""
    if not recipe.grouped:
        return outs * ins + 4 * outs
    groups = ins // (recipe.group_size or ins)
    order = 4 * ins if layout_of(recipe) == "gptq" else 0
    return outs * ins * recipe.bits // 8 + groups * outs * (16 + recipe.bits) // 8 + order


def working_bytes(ready: Ready, batch: int) -> int:
    """Most that one layer takes at once, beside what the process has anyway."""
    spec, recipe = ready.source.spec, ready.recipe
    shapes = linear_shapes(spec)
    sizes = {name: outs * ins for name, (outs, ins) in shapes.items()}
    # the layer in float32, and its digits
    layer = 5 * sum(sizes.values())
    # of what is rounded at a time; awq looks at all linears that read the same at once
    at_once = max(sizes.values())
    if recipe.method == "awq":
        at_once = max(sum(sizes[name] for name in one.linears) for one in junctions(spec))
    sums = statistics_bytes(spec, recipe)
    rounding = layer + 4 * _COPIES * at_once + sums + derived_bytes(spec, recipe)
    return max(rounding, layer + sums + _forward_bytes(ready, batch)) if sums else rounding


def _forward_bytes(ready: Ready, batch: int) -> int:
    """Of some windows on their way through a layer."""
    spec, length = ready.source.spec, ready.length
    width = spec.intermediate if spec.moe is None else spec.moe.intermediate
    # gate and up apart, together, acted on and multiplied
    linears = 4 * batch * length * 6 * (width + spec.hidden)
    return linears + 8 * batch * spec.heads * length**2
