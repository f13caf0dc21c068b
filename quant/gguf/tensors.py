"""A checkpoint's tensors as a GGUF file holds them: names, order of rows, experts in a stack."""

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
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.folder import Checkpoint
from localgen.backends.formats.hf.tensor_shapes import Shape, expected_shapes
from localgen.quant.gguf.names import TensorNames, architecture
from localgen.quant.gguf.rope import rope_factors

Array = NDArray[np.float32]
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)
_F32 = GGMLQuantizationType.F32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the output. parts: loads its values, float32 in GGUF's order of rows, some
    rows or one expert after the other."""

    name: str
    shape: Shape
    type: GGMLQuantizationType
    parts: Callable[[], Iterator[Array]]

    def byte_shape(self) -> Shape:
        """Shape of the packed values, as bytes."""
        return gguf.quant_shape_to_byte_shape(self.shape, self.type)

    def num_bytes(self) -> int:
        return math.prod(self.byte_shape())

    def packed(self) -> NDArray[np.uint8]:
        """The values in the tensor's type. LoadFailed: they are no numbers, or F16 cannot hold
        them."""
        packed = np.empty(self.num_bytes(), np.uint8)
        start = 0
        for part in self.parts():
            raw = np.ascontiguousarray(self._pack(part)).reshape(-1).view(np.uint8)
            packed[start : start + raw.size] = raw
            start += raw.size
        assert start == packed.size, (self.name, start, packed.size)
        return packed

    def _pack(self, values: Array) -> NDArray[Any]:
        if not np.isfinite(values).all():
            raise LoadFailed(f"{self.name} has values that are no numbers: the model is damaged")
        with np.errstate(over="ignore"):  # the check below names the tensor
            packed = gguf.quantize(values, self.type)
        if self.type is GGMLQuantizationType.F16 and not np.isfinite(packed).all():
            raise LoadFailed(f"{self.name} has values that F16 cannot hold: use BF16 or F32")
        return packed


def plan_tensors(
    source: Path, checkpoint: Checkpoint, spec: ModelSpec, kind: GGMLQuantizationType
) -> list[GgufTensor]:
    """The output's tensors in order, all checked, none read yet.

    kind: of matrices; norms, biases, routers and rope factors are F32. LoadFailed: a tensor is
    missing, too many or of another shape. InvalidRequest: rows that `kind` cannot pack.
    """
    shapes = expected_shapes(spec)
    _check(source, checkpoint, spec, shapes)
    names = TensorNames(spec)
    tensors: dict[str, GgufTensor] = {}
    stacks: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        module, _, suffix = name.rpartition(".")
        place = names.place(module)
        target = f"{place.name}.{suffix}"
        if place.expert is not None:
            stacks.setdefault(target, []).append(name)
            shape = (len(stacks[target]), *shape)
        own = _type(place.name, shape, kind)
        _check_rows(name, shape, own)
        members = stacks.get(target, [name])
        tensors[target] = GgufTensor(target, shape, own, _parts(checkpoint, spec, members))
    for name, factors in rope_factors(spec.rope).items():
        tensors[name] = GgufTensor(name, factors.shape, _F32, lambda f=factors: iter([f]))  # type: ignore[misc]
    return list(tensors.values())


def _type(name: str, shape: Shape, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """A router decides by small differences, so llama.cpp keeps it exact."""
    return _F32 if len(shape) == 1 or name.endswith("ffn_gate_inp") else kind


def _check(source: Path, checkpoint: Checkpoint, spec: ModelSpec, shapes: dict[str, Shape]) -> None:
    for name, shape in shapes.items():
        if name not in checkpoint:
            raise LoadFailed(f"{source} has no tensor {name}")
        if checkpoint.shape(name) != shape:
            raise LoadFailed(
                f"{source}: {name} is of shape {checkpoint.shape(name)}, config.json says {shape}"
            )
    # a tied head is the embedding once more
    known = shapes.keys() | ({"lm_head.weight"} if spec.tied else set())
    for name in checkpoint.names():
        if name not in known and not name.endswith(_NOT_WEIGHTS):
            kind = spec.architecture.removesuffix("ForCausalLM")
            raise LoadFailed(f"{source}: tensor {name} is not part of a {kind} model")


def _check_rows(name: str, shape: Shape, kind: GGMLQuantizationType) -> None:
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if shape[-1] % block:
        raise InvalidRequest(
            f"{name} has rows of {shape[-1]} values, {kind.name} packs {block}: use F16",
            param="type",
        )


def _parts(
    checkpoint: Checkpoint, spec: ModelSpec, names: list[str]
) -> Callable[[], Iterator[Array]]:
    module = names[0].split(".")[-2]
    heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}.get(module)
    if heads is not None and architecture(spec) is MODEL_ARCH.LLAMA:
        return lambda: (interleave_rotary(checkpoint.read(name), heads) for name in names)
    change = _change(spec, module)
    return lambda: (change(slab) for name in names for slab in checkpoint.slabs(name))


def _change(spec: ModelSpec, module: str) -> Callable[[Array], Array]:
    """How llama.cpp wants what Hugging Face has under this name."""
    # queries reach attention scaled, through their norm where they have one
    scaled = module == ("q_norm" if spec.qk_norm else "q_proj")
    factor = np.float32(spec.attn_scale / llama_cpp_scale(spec) if scaled else 1.0)
    if spec.norm_offset and module.endswith("norm"):
        return lambda weight: (weight + np.float32(1.0)) * factor
    return (lambda rows: rows * factor) if factor != 1.0 else (lambda rows: rows)


def llama_cpp_scale(spec: ModelSpec) -> float:
    """What llama.cpp multiplies attention scores by: files cannot say."""
    # the 27B models by their number of layers, whose queries are scaled otherwise
    big = {MODEL_ARCH.GEMMA2: 46, MODEL_ARCH.GEMMA3: 62}.get(architecture(spec))
    width = spec.hidden // spec.heads if spec.layers == big else spec.head_dim
    return float(width**-0.5)


def interleave_rotary(weight: Array, heads: int) -> Array:
    """Rows of a q or k projection from Hugging Face's order to GGUF's, within each head.

    weight: [heads * head_dim, …]. Hugging Face rotates row i with row i + head_dim / 2,
    llama.cpp rotates neighbours: row 0, head_dim / 2, 1, head_dim / 2 + 1, …
    """
    half = weight.shape[0] // heads // 2
    split = weight.reshape(heads, 2, half, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)
