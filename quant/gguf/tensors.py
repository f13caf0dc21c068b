"""Tensors of a GGUF file from those of a checkpoint: renamed, rows reordered, experts stacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType
from numpy.typing import NDArray

from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.formats.architecture.families import FAMILIES
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.gguf.rope import interleave_rotary, rope_factor_tensors
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.backends.formats.hf.tensor_names import TensorShape, expected_shapes
from localgen.quant.gguf.names import GgufNameMap, gguf_model_arch

Array = NDArray[np.float32]
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)
_F32 = GGMLQuantizationType.F32


@dataclass(frozen=True, slots=True)
class GgufOutputTensor:
    """One tensor of the output. chunks: loads its values, float32 in GGUF's row order, some rows or
    one expert at a time."""

    name: str
    shape: TensorShape
    type: GGMLQuantizationType
    chunks: Callable[[], Iterator[Array]]

    def byte_shape(self) -> TensorShape:
        """Shape of the packed values in bytes."""
        return gguf.quant_shape_to_byte_shape(self.shape, self.type)

    def num_bytes(self) -> int:
        return math.prod(self.byte_shape())

    def encode(self) -> NDArray[np.uint8]:
        """Load and pack the values. Raises LoadFailed if they are not finite or overflow F16."""
        packed = np.empty(self.num_bytes(), np.uint8)
        start = 0
        for part in self.chunks():
            raw = np.ascontiguousarray(self._encode_chunk(part)).reshape(-1).view(np.uint8)
            packed[start : start + raw.size] = raw
            start += raw.size
        assert start == packed.size, (self.name, start, packed.size)
        return packed

    def _encode_chunk(self, values: Array) -> NDArray[Any]:
        if not np.isfinite(values).all():
            raise LoadFailed(f"{self.name} has NaN or infinite values: the model is damaged")
        with np.errstate(over="ignore"):  # the check below names the tensor
            packed = gguf.quantize(values, self.type)
        if self.type is GGMLQuantizationType.F16 and not np.isfinite(packed).all():
            raise LoadFailed(f"{self.name} has values that F16 cannot hold: use BF16 or F32")
        return packed


def plan_gguf_tensors(
    source: Path, checkpoint: NumpyCheckpoint, spec: ModelSpec, matrix_type: GGMLQuantizationType
) -> list[GgufOutputTensor]:
    """Tensors of the output in order, checked but not loaded.

    matrix_type: of matrices; norms, biases, routers and RoPE factors are F32. Raises LoadFailed for
    a tensor that is missing, unknown or of another shape, InvalidRequest for rows that matrix_type
    cannot pack.
    """
    shapes = expected_shapes(spec)
    _check_tensors(source, checkpoint, spec, shapes)
    names = GgufNameMap(spec)
    tensors: dict[str, GgufOutputTensor] = {}
    stacks: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        module, _, suffix = name.rpartition(".")
        place = names.gguf_name(module)
        target = f"{place.name}.{suffix}"
        if place.expert is not None:
            stacks.setdefault(target, []).append(name)
            shape = (len(stacks[target]), *shape)
        own = _tensor_type(place.name, shape, matrix_type)
        _check_row_blocks(name, shape, own)
        members = stacks.get(target, [name])
        tensors[target] = GgufOutputTensor(
            target, shape, own, _chunk_loader(checkpoint, spec, members)
        )
    for name, factors in rope_factor_tensors(spec.rope).items():
        tensors[name] = GgufOutputTensor(name, factors.shape, _F32, lambda f=factors: iter([f]))  # type: ignore[misc]
    return list(tensors.values())


def _tensor_type(
    name: str, shape: TensorShape, matrix_type: GGMLQuantizationType
) -> GGMLQuantizationType:
    # small differences decide in a router: llama.cpp keeps it in F32
    return _F32 if len(shape) == 1 or name.endswith("ffn_gate_inp") else matrix_type


def _check_tensors(
    source: Path, checkpoint: NumpyCheckpoint, spec: ModelSpec, shapes: dict[str, TensorShape]
) -> None:
    for name, shape in shapes.items():
        if name not in checkpoint:
            raise LoadFailed(f"{source} has no tensor {name}")
        if checkpoint.shape(name) != shape:
            raise LoadFailed(
                f"{source}: {name} is of shape {checkpoint.shape(name)}, config.json says {shape}"
            )
    # a tied head repeats the embedding
    known = shapes.keys() | ({"lm_head.weight"} if spec.tied_embeddings else set())
    for name in checkpoint.names():
        if name not in known and not name.endswith(_NOT_WEIGHTS):
            kind = spec.architecture.removesuffix("ForCausalLM")
            raise LoadFailed(f"{source}: tensor {name} is not part of a {kind} model")


def _check_row_blocks(name: str, shape: TensorShape, tensor_type: GGMLQuantizationType) -> None:
    block = gguf.GGML_QUANT_SIZES[tensor_type][0]
    if shape[-1] % block:
        raise InvalidRequest(
            f"{name} has rows of {shape[-1]} values, {tensor_type.name} packs {block}: use F16",
            param="type",
        )


def _chunk_loader(
    checkpoint: NumpyCheckpoint, spec: ModelSpec, names: list[str]
) -> Callable[[], Iterator[Array]]:
    module = names[0].split(".")[-2]
    if _rotary_heads(spec, module) is not None:
        return lambda: (to_gguf_rows(spec, module, checkpoint.read(name)) for name in names)
    change = _weight_transform(spec, module)
    return lambda: (change(slab) for name in names for slab in checkpoint.row_chunks(name))


def to_gguf_rows(spec: ModelSpec, module: str, weight: Array) -> Array:
    """A weight as llama.cpp expects it. module: last part of its name, such as `q_proj`."""
    heads = _rotary_heads(spec, module)
    if heads is None:
        return _weight_transform(spec, module)(weight)
    return interleave_rotary(weight, heads)


def from_gguf_rows(spec: ModelSpec, linear: str, rows: Array) -> Array:
    """The weight of a linear, from what to_gguf_rows returned."""
    heads = _rotary_heads(spec, linear)
    if heads is None:
        return rows / _query_factor(spec, linear)
    order = interleave_rotary(np.arange(len(rows), dtype=np.float32), heads)
    return rows[np.argsort(order)]


def _rotary_heads(spec: ModelSpec, module: str) -> int | None:
    """Heads whose rows llama.cpp has in another order; None for other modules."""
    if gguf_model_arch(spec) is not MODEL_ARCH.LLAMA:
        return None
    return {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(module)


def _query_factor(spec: ModelSpec, module: str) -> np.float32:
    """llama.cpp's attention scale is fixed: others go into the query's norm, or its projection."""
    scaled = module == ("q_norm" if spec.qk_norm else "q_proj")
    return np.float32(spec.attn_scale / llama_cpp_attention_scale(spec) if scaled else 1.0)


def _weight_transform(spec: ModelSpec, module: str) -> Callable[[Array], Array]:
    """Conversion of a module's rows, in any number, to what llama.cpp expects."""
    factor = _query_factor(spec, module)
    if spec.norm_offset and module.endswith("norm"):
        return lambda weight: (weight + np.float32(1.0)) * factor
    return (lambda rows: rows * factor) if factor != 1.0 else (lambda rows: rows)


def llama_cpp_attention_scale(spec: ModelSpec) -> float:
    """Attention scale that llama.cpp uses; no metadata key sets it."""
    # the 27B models, recognized by their number of layers, have another scale
    big = FAMILIES[spec.architecture].layers_scaled_by_hidden
    width = spec.hidden_size // spec.num_heads if spec.num_layers == big else spec.head_dim
    return float(width**-0.5)
