"""The weights of a model's files: how many bytes they are, and how many one token reads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.formats.architecture.model_spec import QuantizationConfig
from localgen.backends.formats.gguf.reader import GgufReader
from localgen.backends.formats.hf.quantization_config import read_quantization_config
from localgen.backends.formats.hf.safetensors import read_safetensors_header
from localgen.backends.formats.model_files import ModelFile

# of these a token reads one row
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight", "embed_tokens.weight")
_HEADS = ("output.weight", "lm_head.weight")
_EXPERTS = re.compile(r"_exps\.|\.experts\.")
# what a widened linear has beside its weights
_QUANT_TENSORS = ("qzeros", "scales", "g_idx", "weight_scale")
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """size_bytes: of a GGUF file as it is, of a folder as our own engine keeps them in 16 bits, for
    nothing else runs it: what no kernel of it computes with is widened. read_bytes: what computing
    one token reads, with the active experts only. params: how many there are; None: not known, for
    several may share a number."""

    size_bytes: int
    read_bytes: int
    params: int | None


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    size_bytes: int
    num_elements: int


def read_weight_sizes(file: ModelFile, shape: ModelShape | None) -> WeightSizes:
    """By the headers of the files. LoadFailed: one is damaged."""
    tensors = _from_gguf(file.shards) if file.is_gguf else _from_folder(file)
    return WeightSizes(
        size_bytes=sum(tensor.size_bytes for tensor in tensors),
        read_bytes=round(_read_bytes(tensors, shape)),
        params=sum(tensor.num_elements for tensor in tensors) if file.is_gguf else None,
    )


def _read_bytes(tensors: list[_Tensor], shape: ModelShape | None) -> float:
    has_head = any(tensor.name.endswith(_HEADS) for tensor in tensors)
    active = shape.num_active_experts / shape.num_experts if shape and shape.num_experts else 1.0
    total = 0.0
    for tensor in tensors:
        # without a head of its own, the embedding is read as one
        if tensor.name.endswith(_EMBEDDINGS) and (has_head or "per_layer" in tensor.name):
            continue
        total += tensor.size_bytes * (active if _EXPERTS.search(tensor.name) else 1.0)
    return total


def _from_gguf(shards: Iterable[Path]) -> list[_Tensor]:
    return [
        _Tensor(tensor.name, tensor.data.nbytes, tensor.num_elements)
        for path in shards
        for tensor in GgufReader(path).tensors
    ]


def _from_folder(file: ModelFile) -> list[_Tensor]:
    tensors = [
        _Tensor(name, tensor.num_bytes, math.prod(tensor.shape))
        for path in file.shards
        for name, tensor in read_safetensors_header(path).items()
    ]
    quant = _read_folder_quant(file.path)
    return tensors if quant is None else [_loaded_tensor(tensor, quant) for tensor in tensors]


def _read_folder_quant(folder: Path) -> QuantizationConfig | None:
    try:
        return read_quantization_config(ConfigFields.from_file(folder / "config.json"))
    except LoadFailed:
        return None  # the engine that loads it says what is wrong


def _loaded_tensor(tensor: _Tensor, quant: QuantizationConfig) -> _Tensor:
    """A tensor as it is in memory."""
    if not (quant.dequantized_on_load or _EXPERTS.search(tensor.name)):
        return tensor
    part = tensor.name.rpartition(".")[2]
    if part in _QUANT_TENSORS:
        return replace(tensor, size_bytes=0)
    digits = (
        tensor.num_elements * _WORD_BITS // quant.bits if part == "qweight" else tensor.num_elements
    )
    return replace(tensor, size_bytes=2 * digits)
