"""Conversion of Hugging Face folders to GGUF, one tensor in memory at a time."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localgen.backends.errors import InvalidRequest, LoadFailed, ModelNotFound
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.folder import read_json, read_optional_json
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.backends.units import format_size
from localgen.quant.gguf.imatrix import LONGEST_IMATRIX_KEYS
from localgen.quant.gguf.metadata import (
    add_model_keys,
    add_sampling_keys,
    add_vocabulary_keys,
    check_convertible,
)
from localgen.quant.gguf.names import gguf_model_arch
from localgen.quant.gguf.tensors import GgufOutputTensor, plan_gguf_tensors
from localgen.quant.gguf.vocabulary import GgufVocabulary, read_gguf_vocabulary
from localgen.quant.request.events import OnEvent, ProgressEvent
from localgen.quant.request.gguf_types import DIRECT_TYPES, GGUF_TYPES, GgufType

# a model of this name strips white space after special tokens in llama.cpp, which refuses to load
# it without these tokens
_PHI_3 = ("phi-3", "phi3")
_PHI_3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}


def convert_to_gguf(
    source: Path,
    target: Path,
    file_type: str = "F16",
    *,
    override_folder: Path | None = None,
    extra_keys: Mapping[str, str | int] | None = None,
    on_event: OnEvent = lambda event: None,
) -> None:
    """Write the model folder `source` as the GGUF file `target`, atomically.

    file_type: F32, F16, BF16 or Q8_0; norms are always F32. override_folder: has safetensors files
    whose tensors replace the model's tensors of the same names. extra_keys: metadata, whose numbers
    are written as uint32.

    Raises ModelNotFound if the folder or a file is missing, LoadFailed if a file is damaged or
    cannot be converted or the disk is too small, and InvalidRequest if the file type is unknown or
    does not fit the model.
    """
    if file_type not in DIRECT_TYPES:
        raise InvalidRequest(
            f"unknown file type {file_type}: use one of {', '.join(DIRECT_TYPES)}", param="type"
        )
    if not source.is_dir():
        raise ModelNotFound(f"{source} is not a folder")
    raw = read_json(source / "config.json")
    spec = read_hf_config(source)
    check_convertible(source / "config.json", spec)
    kind = GGUF_TYPES[file_type]
    tensors = plan_gguf_tensors(
        source, NumpyCheckpoint(source, override_folder), spec, kind.weight_type
    )
    writer = _gguf_writer(source, raw, spec, kind, tensors)
    _add_keys(writer, extra_keys or {})
    _write_file(writer, tensors, target, on_event)


def gguf_header_bytes(source: Path, tensors: list[GgufOutputTensor]) -> int:
    """Size of the metadata before the tensors in a GGUF file of any type, with its padding and with
    room for the longest description of an importance matrix.

    Raises as convert_to_gguf.
    """
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        raw, spec = read_json(source / "config.json"), read_hf_config(source)
        writer = _gguf_writer(source, raw, spec, GGUF_TYPES["F16"], tensors)
        _add_keys(writer, LONGEST_IMATRIX_KEYS)
        try:
            _write_header(writer, Path(file.name))
        finally:
            writer.close()
        size = os.path.getsize(file.name)
    return size + -size % gguf.GGUF_DEFAULT_ALIGNMENT


def _add_keys(writer: gguf.GGUFWriter, keys: Mapping[str, str | int]) -> None:
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)


def _gguf_writer(
    source: Path,
    raw: dict[str, Any],
    spec: ModelSpec,
    kind: GgufType,
    tensors: list[GgufOutputTensor],
) -> gguf.GGUFWriter:
    """A writer with the model's metadata and the description of its tensors. raw: config.json."""
    generation = read_optional_json(source / "generation_config.json")
    vocabulary = read_gguf_vocabulary(source, spec.vocab_size, raw, generation)
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf_model_arch(spec)])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(_model_name(source, spec, vocabulary))
    writer.add_file_type(kind.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_model_keys(writer, spec)
    add_vocabulary_keys(writer, vocabulary)
    add_sampling_keys(writer, source / "generation_config.json", generation)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.byte_shape(),
            np.dtype(np.uint8),
            tensor.num_bytes(),
            tensor.type,
        )
    return writer


def _model_name(source: Path, spec: ModelSpec, vocabulary: GgufVocabulary) -> str:
    name = source.resolve().name
    named = any(word in name.lower() for word in _PHI_3)
    can = vocabulary.special_tokens_strip_right and _PHI_3_TOKENS.issubset(vocabulary.tokens)
    if can and spec.architecture == "Phi3ForCausalLM":
        return name if named else f"{name} (Phi-3)"
    return re.sub(r"(?i)phi-?3", "Phi 3", name) if named else name


def _write_file(
    writer: gguf.GGUFWriter,
    tensors: list[GgufOutputTensor],
    target: Path,
    on_event: OnEvent,
) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        _check_disk_space(target, sum(tensor.num_bytes() for tensor in tensors))
        _write_header(writer, part)
        _write_tensors(writer, tensors, on_event)
        writer.close()
        part.replace(target)
    except OSError as error:
        raise LoadFailed(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        writer.close()
        part.unlink(missing_ok=True)


def _write_header(writer: gguf.GGUFWriter, path: Path) -> None:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write_tensors(
    writer: gguf.GGUFWriter, tensors: list[GgufOutputTensor], on_event: OnEvent
) -> None:
    total = sum(tensor.num_bytes() for tensor in tensors)
    written = 0
    for tensor in tensors:
        writer.write_tensor_data(tensor.encode())
        written += tensor.num_bytes()
        on_event(ProgressEvent("converting to GGUF", written, total, "bytes"))


def _check_disk_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise LoadFailed(
            f"{target} takes {format_size(needed)}, its disk has {format_size(free)} free: "
            "make room or write elsewhere"
        )
