"""Estimates of a quantization: memory, disk, and the size of its result."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from localgen.backends.formats.hf.tensor_names import linear_shapes
from localgen.quant.calibrate.passes import (
    gptq_factor_bytes,
    paired_inputs_bytes,
    statistics_bytes,
)
from localgen.quant.calibrate.scaling import scale_mappings
from localgen.quant.files.packing import is_symmetric
from localgen.quant.preflight import PreparedQuantization
from localgen.quant.request.recipe import LayerMode, Recipe

_BATCH_TOKENS = 2048
_ROUNDING_COPIES = 4
# also unpacked for the grids, and the bits of all codes
_GGUF_COPIES = 8
# values kept for the gradient of a linear's rounding, and the gradients
_GRAPH_COPIES = 10


@dataclass(frozen=True, slots=True)
class ResourceEstimate:
    """peak_bytes: peak memory of the process on the host. disk_bytes: peak disk usage.

    output_bytes: weights of the result. states_bytes: activations of all windows before one layer,
    also in the original model where the recipe compares them.
    batch_windows: windows that go through a layer together.
    """

    peak_bytes: int
    disk_bytes: int
    output_bytes: int
    states_bytes: int
    batch_windows: int


def estimate_resources(
    prepared: PreparedQuantization, mode: LayerMode = "round"
) -> ResourceEstimate:
    """mode: as in QuantizeJob."""
    spec = prepared.source.spec
    states = 0
    if prepared.windows is not None:
        models = 2 if prepared.recipe.needs_originals and mode != "observe" else 1
        states = 4 * spec.hidden_size * prepared.windows.ids.numel() * models
    output = _written_bytes(prepared, mode)
    batch = max(1, _BATCH_TOKENS // prepared.seq_len)
    return ResourceEstimate(
        peak_bytes=psutil.Process().memory_info().rss + _peak_layer_bytes(prepared, batch, mode),
        disk_bytes=output + 2 * states,
        output_bytes=output,
        states_bytes=states,
        batch_windows=batch,
    )


def _written_bytes(prepared: PreparedQuantization, mode: LayerMode) -> int:
    match mode:
        case "round":
            return _result_bytes(prepared)
        case "gguf":  # llama.cpp's file, and the rows that go into it
            return 2 * _result_bytes(prepared)
        case "fold":
            return _unquantized_layers_bytes(prepared)
        case "observe":
            return 0


def _result_bytes(prepared: PreparedQuantization) -> int:
    """Size of the result's tensors."""
    spec = prepared.source.spec
    shapes = linear_shapes(spec)
    packed = spec.num_layers * sum(
        _packed_linear_bytes(prepared.recipe, *shape) for shape in shapes.values()
    )
    plain = spec.num_params - spec.num_layers * sum(outs * ins for outs, ins in shapes.values())
    norms = spec.num_layers * 4 * spec.hidden_size + spec.hidden_size
    return packed + (plain + norms) * prepared.dtype.itemsize


def _unquantized_layers_bytes(prepared: PreparedQuantization) -> int:
    """Size of the linears of all layers without rounding."""
    spec = prepared.source.spec
    shapes = linear_shapes(spec).values()
    return spec.num_layers * sum(outs * ins for outs, ins in shapes) * prepared.dtype.itemsize


def _packed_linear_bytes(recipe: Recipe, outs: int, ins: int) -> int:
    """Size of one quantized linear."""
    if not recipe.has_groups:
        return outs * ins + 4 * outs
    groups = ins // (recipe.group_size or ins)
    zero_bits = 0 if is_symmetric(recipe.bits) else recipe.bits
    return outs * ins * recipe.bits // 8 + groups * outs * (16 + zero_bits) // 8


def _peak_layer_bytes(prepared: PreparedQuantization, batch_windows: int, mode: LayerMode) -> int:
    """Peak memory of processing one layer, without the memory the process has before."""
    spec, recipe = prepared.source.spec, prepared.recipe
    shapes = linear_shapes(spec)
    sizes = {name: outs * ins for name, (outs, ins) in shapes.items()}
    # the layer in float32 and its codes; rows of a GGUF file are also kept unpacked
    layer = (9 if mode == "gguf" else 5) * sum(sizes.values())
    # weights rounded at a time; awq handles all readers of one input together
    largest = at_once = max(sizes.values())
    if recipe.method == "awq":
        at_once = max(sum(sizes[name] for name in one.linears) for one in scale_mappings(spec))
    sums = statistics_bytes(spec, recipe)
    copies = _GGUF_COPIES if mode == "gguf" else _ROUNDING_COPIES
    rounding = layer + 4 * copies * at_once + sums + gptq_factor_bytes(spec, recipe)
    if not sums:
        return rounding
    forward = _forward_bytes(prepared, batch_windows)
    learning = 0
    if recipe.rounding_steps and mode in ("round", "gguf"):
        # each weight as given, its offset, rounded and its gradient; one linear's graph; the
        # activations of the layer and their gradients
        learning = layer + 16 * sum(sizes.values()) + 4 * _GRAPH_COPIES * largest + 2 * forward
    return max(rounding, layer + sums + forward, learning)


def _forward_bytes(prepared: PreparedQuantization, batch_windows: int) -> int:
    """Memory of the forward pass of some windows through a layer."""
    spec, length = prepared.source.spec, prepared.seq_len
    width = spec.intermediate_size if spec.moe is None else spec.moe.intermediate_size
    # gate and up: separate, concatenated, activated and multiplied
    linears = 4 * batch_windows * length * 6 * (width + spec.hidden_size)
    paired = paired_inputs_bytes(spec, prepared.recipe, batch_windows * length)
    return linears + paired + 8 * batch_windows * spec.num_heads * length**2
