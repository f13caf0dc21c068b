"""Read a model's metadata without loading it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from localgen.backends.errors import LocalgenError
from localgen.backends.formats.architecture.llama_cpp_windows import (
    gguf_window_note,
    spec_window_note,
)
from localgen.backends.formats.gguf.reader import GgufReader
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.folder import read_chat_template, read_optional_json
from localgen.backends.formats.model_files import ModelFile, stem_of
from localgen.backends.formats.weight_sizes import folder_quantization
from localgen.backends.sampling_params import SAMPLERS, SamplingParams
from localgen.hub.catalog import CatalogEntry, entry_by_repo
from localgen.hub.packaged import packaged_sampling
from localgen.hub.quants import quant_of

_SAMPLING_PREFIX = "general.sampling."
_SAMPLING = (*(sampler.hf_key for sampler in SAMPLERS if sampler.hf_key), "do_sample")


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Fields are None if unknown.

    bits, group_size: of a folder's quantized weights. bits_per_weight, tensor_types: of a GGUF
    file; the types with most weights come first. sampling: the model's sampling defaults by
    original name. note: what llama.cpp computes differently.
    """

    architecture: str | None = None
    title: str | None = None
    params: int | None = None
    quantization: str | None = None
    bits: int | None = None
    group_size: int | None = None
    bits_per_weight: float | None = None
    tensor_types: list[str] | None = None
    context: int | None = None
    layers: int | None = None
    hidden: int | None = None
    vocab: int | None = None
    license: str | None = None
    chat_template: str | None = None
    note: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


def read_metadata(file: ModelFile) -> ModelMetadata:
    """Read the metadata of a model. Raises LoadFailed if its files are damaged."""
    found = _from_gguf(file) if file.is_gguf else _from_folder(file.path)
    ours = packaged_sampling(file)
    if ours is None:
        return found
    unset = asdict(SamplingParams())
    given = {name: value for name, value in asdict(ours).items() if value != unset[name]}
    return replace(found, sampling=given)


def catalog_entry_of(file: ModelFile) -> CatalogEntry | None:
    """Return the catalog entry of a cached model, or None."""
    return entry_by_repo(file.name.partition(":")[0]) if file.source == "cache" else None


def _from_gguf(file: ModelFile) -> ModelMetadata:
    reader = GgufReader(file.path)
    architecture = _text(reader, "general.architecture")
    others = [GgufReader(path) for path in file.shards[1:]]
    tensors = [tensor for part in (reader, *others) for tensor in part.tensors]
    embedding = next((t for t in tensors if t.name == "token_embd.weight"), None)
    weights = Counter[str]()
    for tensor in tensors:
        weights[tensor.type_name] += tensor.num_elements
    num_bits = 8 * sum(tensor.data.nbytes for tensor in tensors)
    return ModelMetadata(
        architecture=architecture,
        title=_text(reader, "general.name"),
        params=weights.total(),
        quantization=_file_type(_number(reader, "general.file_type"))
        or _quant_from_filename(stem_of(file.path)),
        bits_per_weight=round(num_bits / weights.total(), 2) if weights.total() else None,
        tensor_types=[name for name, _ in weights.most_common()],
        context=_number(reader, f"{architecture}.context_length"),
        layers=_number(reader, f"{architecture}.block_count"),
        hidden=_number(reader, f"{architecture}.embedding_length"),
        vocab=embedding.shape[0] if embedding is not None else None,
        license=_text(reader, "general.license"),
        chat_template=_text(reader, "tokenizer.chat_template"),
        note=gguf_window_note(
            architecture,
            _number(reader, f"{architecture}.attention.sliding_window"),
            _number(reader, f"{architecture}.context_length"),
        ),
        sampling={
            key.removeprefix(_SAMPLING_PREFIX): reader.value(key)
            for key in reader
            if key.startswith(_SAMPLING_PREFIX)
        },
    )


def _file_type(number: int | None) -> str | None:
    from gguf import LlamaFileType

    if number is None:
        return None
    try:
        name = LlamaFileType(number).name
    except ValueError:
        return None  # newer than the gguf package
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _quant_from_filename(stem: str) -> str | None:
    quant = quant_of(stem)
    return None if quant == stem else quant


def _from_folder(folder: Path) -> ModelMetadata:
    config = read_optional_json(folder / "config.json")
    # multimodal models have the text model's figures in text_config
    text = _object(config, "text_config") or config
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    generation = read_optional_json(folder / "generation_config.json")
    quant = folder_quantization(folder)
    return ModelMetadata(
        architecture=first if isinstance(first, str) else _text(config, "model_type"),
        quantization=_text(_object(config, "quantization_config"), "quant_method")
        or _text(config, "dtype")
        or _text(config, "torch_dtype"),
        bits=None if quant is None else quant.bits,
        group_size=None if quant is None else quant.group_size,
        context=_number(text, "max_position_embeddings"),
        layers=_number(text, "num_hidden_layers"),
        hidden=_number(text, "hidden_size"),
        vocab=_number(text, "vocab_size"),
        chat_template=read_chat_template(folder),
        note=_gguf_note(folder),
        sampling={key: generation[key] for key in _SAMPLING if generation.get(key) is not None},
    )


def _gguf_note(folder: Path) -> str | None:
    try:
        note = spec_window_note(read_hf_config(folder))
    except LocalgenError:
        return None  # no model that can be converted
    return None if note is None else f"as a GGUF file: {note}"


class _Fields(Protocol):
    """A JSON object, or the metadata of a GGUF file."""

    def get(self, key: str, /) -> Any: ...


def _text(fields: _Fields, key: str) -> str | None:
    """A string, or None if it is missing or something else; so are _number and _object."""
    found = fields.get(key)
    return found if isinstance(found, str) else None


def _number(fields: _Fields, key: str) -> int | None:
    found = fields.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _object(fields: _Fields, key: str) -> dict[str, Any]:
    found = fields.get(key)
    return found if isinstance(found, dict) else {}
