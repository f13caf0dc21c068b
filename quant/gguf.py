"""Hugging Face folders of the Llama family to GGUF, one tensor in memory at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType
from numpy.typing import NDArray

from localgen.backends.errors import InvalidRequest, LoadFailed, ModelNotFound
from localgen.quant.checkpoint import Checkpoint, read_json, read_optional_json
from localgen.quant.llama import (
    LlamaConfig,
    expected_shapes,
    interleave_rotary,
    llama3_rope_factors,
    read_config,
)
from localgen.quant.vocabulary import Vocabulary, read_vocabulary

Progress = Callable[[int, int], None]

_FILE_TYPES = {
    "F32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "F16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "BF16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "Q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the output. load gives its values as float32, in GGUF's row order."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    load: Callable[[], NDArray[np.float32]]

    def byte_shape(self) -> tuple[int, ...]:
        return gguf.quant_shape_to_byte_shape(self.shape, self.type)


def convert(
    source: Path, target: Path, file_type: str = "F16", *, progress: Progress | None = None
) -> None:
    """Write the model folder `source` as the GGUF file `target`.

    file_type: F32, F16, BF16 or Q8_0; norms are always F32. progress is called with the bytes
    written so far and in all. `target` appears only when it is complete. ModelNotFound: no such
    folder, or a file is missing. LoadFailed: a file is damaged or of a kind that cannot be
    converted. InvalidRequest: unknown file type, or one that does not fit the model.
    """
    if file_type not in _FILE_TYPES:
        raise InvalidRequest(
            f"unknown file type {file_type}: use one of {', '.join(_FILE_TYPES)}", param="type"
        )
    if not source.is_dir():
        raise ModelNotFound(f"{source} is no folder")
    weight_type, llama_file_type = _FILE_TYPES[file_type]
    raw = read_json(source / "config.json")
    generation = read_optional_json(source / "generation_config.json")
    config = read_config(source / "config.json", raw)
    tensors = list(_plan(source, Checkpoint(source), config, weight_type))
    vocabulary = read_vocabulary(source, raw, generation)

    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(source.resolve().name)
    writer.add_file_type(llama_file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_config(writer, config)
    _add_vocabulary(writer, vocabulary)
    _add_sampling(writer, source / "generation_config.json", generation)
    _write(writer, tensors, target, progress)


def _with_biases(
    checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """`shapes` and the bias of each projection that has one (attention_bias, mlp_bias)."""
    biases = {name.removesuffix("weight") + "bias": shape[:1] for name, shape in shapes.items()}
    return shapes | {name: shape for name, shape in biases.items() if name in checkpoint}


def _plan(
    source: Path, checkpoint: Checkpoint, config: LlamaConfig, weight_type: GGMLQuantizationType
) -> Iterator[_Tensor]:
    """The output's tensors in order, all checked, none read yet."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.layers)
    shapes = _with_biases(checkpoint, expected_shapes(config))
    _check_tensors(source, checkpoint, shapes, config)
    for name, shape in shapes.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None
        kind = weight_type if len(shape) > 1 else GGMLQuantizationType.F32
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if shape[-1] % block:
            raise InvalidRequest(
                f"{name} has rows of {shape[-1]} values, {kind.name} packs {block}: use F16",
                param="type",
            )
        yield _Tensor(target, shape, kind, _loader(checkpoint, name, config))
    if config.rope_scaling.get("kind") == "llama3":
        factors = llama3_rope_factors(config)
        yield _Tensor("rope_freqs.weight", factors.shape, GGMLQuantizationType.F32, lambda: factors)


def _check_tensors(
    source: Path, checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], config: LlamaConfig
) -> None:
    for name, shape in shapes.items():
        if name not in checkpoint:
            raise LoadFailed(f"{source} has no tensor {name}")
        if checkpoint.shape(name) != shape:
            raise LoadFailed(
                f"{source}: {name} is of shape {checkpoint.shape(name)}, config.json says {shape}"
            )
    # a tied head is the embedding once more
    known = shapes.keys() | ({"lm_head.weight"} if config.tied else set())
    for name in checkpoint.names():
        if name not in known and not name.endswith(_NOT_WEIGHTS):
            raise LoadFailed(f"{source}: tensor {name} is not part of a Llama model")


def _loader(
    checkpoint: Checkpoint, name: str, config: LlamaConfig
) -> Callable[[], NDArray[np.float32]]:
    rotary_heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if rotary_heads is None:
        return lambda: checkpoint.read(name)
    return lambda: interleave_rotary(checkpoint.read(name), rotary_heads)


def _add_config(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_vocab_size(config.vocab)
    writer.add_context_length(config.ctx)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling.get("kind") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling["factor"])


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(vocabulary.add_bos)
    if vocabulary.bos_id is not None:
        writer.add_bos_token_id(vocabulary.bos_id)
    if vocabulary.pad_id is not None:
        writer.add_pad_token_id(vocabulary.pad_id)
    # llama.cpp ends an answer at any of these three
    adders = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token_id in zip(adders, vocabulary.end_ids, strict=False):
        add(token_id)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _add_sampling(writer: gguf.GGUFWriter, path: Path, generation: dict[str, Any]) -> None:
    """The model's own sampling defaults; do_sample false is greedy whatever else is set."""
    if generation.get("do_sample") is False:
        writer.add_sampling_temp(0.0)
        return
    adders: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]] = {
        "temperature": (writer.add_sampling_temp, float),
        "top_k": (writer.add_sampling_top_k, int),
        "top_p": (writer.add_sampling_top_p, float),
        "min_p": (writer.add_sampling_min_p, float),
        "repetition_penalty": (writer.add_sampling_penalty_repeat, float),
    }
    for key, (add, number) in adders.items():
        if generation.get(key) is None:
            continue
        try:
            add(number(generation[key]))
        except (TypeError, ValueError):
            raise LoadFailed(f"{path}: {key} is {generation[key]!r}, not a number") from None


def _write(
    writer: gguf.GGUFWriter, tensors: list[_Tensor], target: Path, progress: Progress | None
) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    for tensor in tensors:
        byte_shape = tensor.byte_shape()
        writer.add_tensor_info(
            tensor.name, byte_shape, np.dtype(np.uint8), math.prod(byte_shape), tensor.type
        )
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_tensors(writer, tensors, progress)
        writer.close()
        part.replace(target)
    except OSError as error:
        raise LoadFailed(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        writer.close()
        part.unlink(missing_ok=True)


def _write_tensors(
    writer: gguf.GGUFWriter, tensors: list[_Tensor], progress: Progress | None
) -> None:
    total = sum(math.prod(tensor.byte_shape()) for tensor in tensors)
    written = 0
    for tensor in tensors:
        with np.errstate(over="ignore"):  # the check below names the tensor
            packed = gguf.quantize(tensor.load(), tensor.type)
        if tensor.type is GGMLQuantizationType.F16 and not np.isfinite(packed).all():
            raise LoadFailed(f"{tensor.name} has values that F16 cannot hold: use BF16 or F32")
        packed = np.ascontiguousarray(packed)
        writer.write_tensor_data(packed)
        written += packed.nbytes
        if progress is not None:
            progress(written, total)
