"""Hugging Face folders to GGUF, one tensor in memory at a time."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from localgen.backends.errors import InvalidRequest, LoadFailed, ModelNotFound
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_config
from localgen.backends.formats.hf.folder import Checkpoint, read_json, read_optional_json
from localgen.quant.gguf.metadata import add_model, add_sampling, add_vocabulary, check_model
from localgen.quant.gguf.names import architecture
from localgen.quant.gguf.tensors import GgufTensor, plan_tensors
from localgen.quant.gguf.vocabulary import Vocabulary, read_vocabulary
from localgen.quant.request.gguf_types import TYPES, WRITTEN

Progress = Callable[[int, int], None]
# llama.cpp knows by the model's name that special tokens take the white space behind them along,
# and does not load one of that name without these
_PHI_3 = ("phi-3", "phi3")
_PHI_3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}


def convert(
    source: Path,
    target: Path,
    file_type: str = "F16",
    *,
    changed: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the model folder `source` as the GGUF file `target`.

    file_type: F32, F16, BF16 or Q8_0; norms are always F32. changed: a folder whose safetensors
    files have tensors to take in place of the model's own, by the same names. progress is called
    with the bytes written so far and in all. `target` appears only when it is complete.

    ModelNotFound: no such folder, or a file is missing. LoadFailed: a file is damaged or of a
    kind that cannot be converted, or the disk is too small. InvalidRequest: unknown file type, or
    one that does not fit the model.
    """
    if file_type not in WRITTEN:
        raise InvalidRequest(
            f"unknown file type {file_type}: use one of {', '.join(WRITTEN)}", param="type"
        )
    if not source.is_dir():
        raise ModelNotFound(f"{source} is no folder")
    raw = read_json(source / "config.json")
    generation = read_optional_json(source / "generation_config.json")
    spec = read_config(source)
    check_model(source / "config.json", spec)
    kind = TYPES[file_type]
    tensors = plan_tensors(source, Checkpoint(source, changed), spec, kind.weight_type)
    vocabulary = read_vocabulary(source, spec.vocab, raw, generation)

    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture(spec)])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(_name(source, spec, vocabulary))
    writer.add_file_type(kind.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_model(writer, spec)
    add_vocabulary(writer, vocabulary)
    add_sampling(writer, source / "generation_config.json", generation)
    _write(writer, tensors, target, progress)


def _name(source: Path, spec: ModelSpec, vocabulary: Vocabulary) -> str:
    name = source.resolve().name
    named = any(word in name.lower() for word in _PHI_3)
    can = vocabulary.strips and _PHI_3_TOKENS.issubset(vocabulary.tokens)
    if can and spec.architecture == "Phi3ForCausalLM":
        return name if named else f"{name} (Phi-3)"
    return re.sub(r"(?i)phi-?3", "Phi 3", name) if named else name


def _write(
    writer: gguf.GGUFWriter, tensors: list[GgufTensor], target: Path, progress: Progress | None
) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.byte_shape(),
            np.dtype(np.uint8),
            tensor.num_bytes(),
            tensor.type,
        )
    try:
        _check_room(target, sum(tensor.num_bytes() for tensor in tensors))
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
    writer: gguf.GGUFWriter, tensors: list[GgufTensor], progress: Progress | None
) -> None:
    total = sum(tensor.num_bytes() for tensor in tensors)
    written = 0
    for tensor in tensors:
        writer.write_tensor_data(tensor.packed())
        written += tensor.num_bytes()
        if progress is not None:
            progress(written, total)


def _check_room(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise LoadFailed(
            f"{target} takes {needed / 1e9:.1f} GB, its disk has {free / 1e9:.1f} GB free: "
            "make room or write elsewhere"
        )
