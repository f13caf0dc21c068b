"""Groups of tensors that share a type: one role in one layer, the embedding, the output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.backends.formats.hf.tensor_names import linear_shapes
from localgen.quant.gguf.convert import gguf_header_bytes
from localgen.quant.gguf.ggml_rounding import (
    UNWEIGHED_TYPES,
    WEIGHED_TYPES,
    fits_rows,
    packed_bytes,
)
from localgen.quant.gguf.names import GgufNameMap
from localgen.quant.gguf.tensors import plan_gguf_tensors
from localgen.quant.request.gguf_types import CODE_TYPES

EMBEDDING, OUTPUT = "token_embd", "output"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_SAME_ROLE = {"ffn_gate": "ffn_up"}
_16_BITS = gguf.GGMLQuantizationType.F16
# types whose codes GPTQ chooses, and Q8_0, which loses too little for a choice to matter
GPTQ_LAYER_TYPES = tuple(name for name in WEIGHED_TYPES if name in (*CODE_TYPES, "Q8_0"))


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """layer: None for embedding and output. role: `attn_q`, `ffn_up` (with the gate), ….

    linears: names within the layer of a checkpoint's linears, without `.weight`; empty outside of
    layers. tensors: values and columns of each GGUF tensor by its name. types: that its rows
    divide into, fewest bits first.
    """

    layer: int | None
    role: str
    linears: tuple[str, ...]
    tensors: tuple[tuple[str, int, int], ...]
    types: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.role if self.layer is None else f"blk.{self.layer}.{self.role}"

    def num_bytes(self, type_name: str) -> int:
        """Size of its tensors in a file."""
        sizes = (packed_bytes(type_name, values) for _, values, _ in self.tensors)
        return sum(map(_padded, sizes))


@dataclass(frozen=True, slots=True)
class FileShape:
    """All of a GGUF file. header_bytes: size of its metadata. other_bytes: size of the tensors
    outside of groups, which keep their type."""

    groups: tuple[TensorGroup, ...]
    header_bytes: int
    other_bytes: int
    num_weights: int


def plan_file(
    folder: Path, spec: ModelSpec, layer_types: Sequence[str] = WEIGHED_TYPES
) -> FileShape:
    """Groups of a model folder's tensors. layer_types: that groups of layers may have.

    Raises as plan_gguf_tensors, and InvalidRequest for rows that no type divides.
    """
    tensors = plan_gguf_tensors(folder, NumpyCheckpoint(folder), spec, _16_BITS)
    linears = _linears_by_tensor(spec)
    members: dict[tuple[int | None, str], list[tuple[str, int, int]]] = {}
    other = 0
    for tensor in tensors:
        if tensor.type != _16_BITS:
            other += _padded(tensor.num_bytes())
            continue
        size = (tensor.name, prod(tensor.shape), tensor.shape[-1])
        members.setdefault(_layer_and_role(tensor.name), []).append(size)
    groups = [
        TensorGroup(
            layer,
            role,
            tuple(one for name, _, _ in sizes for one in linears.get(name, ())),
            tuple(sizes),
            _fitting_types(
                (columns for _, _, columns in sizes),
                UNWEIGHED_TYPES if layer is None else layer_types,
            ),
        )
        for (layer, role), sizes in members.items()
    ]
    for group in groups:
        if not group.types:
            name, _, columns = group.tensors[0]
            raise InvalidRequest(
                f"{name} has rows of {columns} values, quantized types need multiples of 32: "
                "use --gguf F16",
                param="gguf",
            )
    weights = sum(prod(one.shape) for one in tensors)
    return FileShape(tuple(groups), gguf_header_bytes(folder, tensors), other, weights)


def _layer_and_role(name: str) -> tuple[int | None, str]:
    module = name.removesuffix(".weight")
    found = _LAYER.fullmatch(module)
    if found is None:
        return None, module
    role = found[2].removesuffix("_exps")
    return int(found[1]), _SAME_ROLE.get(role, role)


def _linears_by_tensor(spec: ModelSpec) -> dict[str, list[str]]:
    """Names within the layer of the linears of each GGUF tensor; several for stacked experts."""
    names = GgufNameMap(spec)
    found: dict[str, list[str]] = {}
    for index in range(spec.num_layers):
        for linear in linear_shapes(spec):
            place = names.gguf_name(f"model.layers.{index}.{linear}")
            found.setdefault(f"{place.name}.weight", []).append(linear)
    return found


def _fitting_types(columns: Iterable[int], types: Sequence[str]) -> tuple[str, ...]:
    lengths = set(columns)
    return tuple(name for name in types if all(fits_rows(name, length) for length in lengths))


def _padded(size: int) -> int:
    return size + -size % gguf.GGUF_DEFAULT_ALIGNMENT
