"""Size of a model's weights in memory, and the bytes read per token."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.formats.architecture.model_spec import QuantizationConfig
from localgen.backends.formats.gguf.reader import GgufReader
from localgen.backends.formats.hf.quantization_config import read_quantization_config
from localgen.backends.formats.hf.safetensors import read_safetensors_header
from localgen.backends.formats.hf.text_part import is_text_part, text_tensor_name
from localgen.backends.formats.model_files import ModelFile

# only one row is read per token
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight", "embed_tokens.weight")
# not attn_output.weight
_HEAD = re.compile(r"^output\.weight$|(^|\.)lm_head\.weight$")
_EXPERTS = re.compile(r"_exps\.|\.experts\.")
# tensors of a quantized linear that are dropped when it is dequantized
_QUANT_TENSORS = (
    *("qzeros", "scales", "g_idx"),
    *("weight_zero_point", "weight_scale", "weight_shape"),
)
_PACKED_WEIGHTS = ("qweight", "weight_packed")
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """size_bytes: of a GGUF file as stored; of a folder as the CUDA backend loads it, with weights
    that no kernel supports dequantized to 16 bits. read_bytes: bytes read per token, with active
    experts only. params: number of weights; read_params: of those read per token. expert_bytes: of
    all experts.
    """

    size_bytes: int
    read_bytes: int
    params: int
    read_params: int
    expert_bytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """num_elements: of weights; 0 for the scales and zero points of a quantized linear."""

    name: str
    size_bytes: int
    num_elements: int


def read_weight_sizes(file: ModelFile, shape: ModelShape | None) -> WeightSizes:
    """Return the sizes from the headers of the files. Raises LoadFailed if one is damaged."""
    tensors = _from_gguf(file.shards) if file.is_gguf else _from_folder(file)
    has_head = any(_HEAD.search(tensor.name) for tensor in tensors)
    read = [(tensor, _read_share(tensor, shape, has_head=has_head)) for tensor in tensors]
    return WeightSizes(
        size_bytes=sum(tensor.size_bytes for tensor in tensors),
        read_bytes=round(sum(share * tensor.size_bytes for tensor, share in read)),
        params=sum(tensor.num_elements for tensor in tensors),
        read_params=round(sum(share * tensor.num_elements for tensor, share in read)),
        expert_bytes=sum(t.size_bytes for t in tensors if _EXPERTS.search(t.name)),
    )


def _read_share(tensor: _Tensor, shape: ModelShape | None, *, has_head: bool) -> float:
    """Share of a tensor that is read per token."""
    if tensor.name.endswith(_EMBEDDINGS):
        # a tied embedding is read as a whole, as the head
        return 0.0 if has_head or "per_layer" in tensor.name else 1.0
    if shape and shape.num_experts and _EXPERTS.search(tensor.name):
        return shape.num_active_experts / shape.num_experts
    return 1.0


def _from_gguf(shards: Iterable[Path]) -> list[_Tensor]:
    return [
        _Tensor(tensor.name, tensor.data.nbytes, tensor.num_elements)
        for path in shards
        for tensor in GgufReader(path).tensors
    ]


def _from_folder(file: ModelFile) -> list[_Tensor]:
    config = _read_folder_config(file.path)
    text_only = config is not None and is_text_part(config.values)
    tensors = [
        _Tensor(name, tensor.num_bytes, math.prod(tensor.shape))
        for path in file.shards
        for name, tensor in read_safetensors_header(path).items()
        if not text_only or text_tensor_name(name) is not None
    ]
    quant = None if config is None else _read_quantization(config)
    return tensors if quant is None else [_loaded_tensor(tensor, quant) for tensor in tensors]


def _read_folder_config(folder: Path) -> ConfigFields | None:
    try:
        return ConfigFields.from_file(folder / "config.json")
    except LoadFailed:
        return None  # loading reports the error


def folder_quantization(folder: Path) -> QuantizationConfig | None:
    """Return the quantization of a checkpoint; None if it has none, or none that can be read."""
    config = _read_folder_config(folder)
    return None if config is None else _read_quantization(config)


def _read_quantization(config: ConfigFields) -> QuantizationConfig | None:
    try:
        return read_quantization_config(config)
    except LoadFailed:
        return None


def _loaded_tensor(tensor: _Tensor, quant: QuantizationConfig) -> _Tensor:
    """The tensor with its size in memory."""
    part = tensor.name.rpartition(".")[2]
    is_dequantized = quant.dequantized_on_load or _EXPERTS.search(tensor.name)
    if part in _QUANT_TENSORS:
        factor = 0 if is_dequantized else _loaded_factor(part, quant)
        return _Tensor(tensor.name, factor * tensor.size_bytes, 0)
    digits = tensor.num_elements
    if part in _PACKED_WEIGHTS:
        digits = digits * _WORD_BITS // quant.bits
    return _Tensor(tensor.name, 2 * digits if is_dequantized else tensor.size_bytes, digits)


def _loaded_factor(part: str, quant: QuantizationConfig) -> int:
    """Size in memory, relative to the file, of a part of a linear that is computed as stored."""
    match part:
        case "weight_shape":
            return 0
        case "qzeros" | "weight_zero_point":
            return 4  # zeros of 4 bits become floats of 16, next to their scales
        case "weight_scale" if quant.method == "pack-quantized" and not quant.zero_point:
            return 2  # zeros that the file has not
    return 1
