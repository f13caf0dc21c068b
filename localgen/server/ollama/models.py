"""Responses of /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from localgen.backends.errors import LoadFailed, ModelNotFound
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.text.reasoning import detect_thinking_tags
from localgen.backends.units import format_params
from localgen.hub.metadata import ModelMetadata, catalog_entry_of, read_metadata
from localgen.hub.resolve import find_preset
from localgen.placement import free_memory
from localgen.server.models.names import find_listed, listed_models
from localgen.server.models.resident import ResidentModel, model_id
from localgen.server.ollama.serializer import format_timestamp

# names of a preset's fields that differ in Ollama's options
_OPTIONS = {"ctx": "num_ctx", "max_tokens": "num_predict"}
# no expiry: the largest duration of Go (int64 nanoseconds)
_MAX_DURATION_S = 2**63 / 1e9


def tags_response(residents: tuple[ResidentModel, ...]) -> dict[str, Any]:
    """List every name that a client may ask for. Reads the disk."""
    listed = listed_models(residents).items()
    return {"models": [_tag_entry(name, file) for name, file in listed if file.path.exists()]}


def ps_response(residents: tuple[ResidentModel, ...]) -> dict[str, Any]:
    """List loaded models. Reads the disk."""
    return {"models": [_ps_entry(resident) for resident in residents if resident.info]}


def show_response(name: str, residents: tuple[ResidentModel, ...]) -> dict[str, Any]:
    """Describe a model. Reads the disk. Raises ModelNotFound, LoadFailed."""
    file = find_listed(name, residents, allow_paths=False)
    facts = _model_metadata(file)
    entry = catalog_entry_of(file)
    preset = find_preset(name)
    own = {} if preset is None else preset.to_table()
    system = own.pop("system", "")
    chosen = {_OPTIONS.get(key, key): own[key] for key in own if key not in ("model", "think")}
    parameters = facts.sampling | chosen
    return {
        "modelfile": _modelfile(file.name, system, chosen),
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in _rows(parameters)),
        **({"system": system} if system else {}),
        "template": facts.chat_template or "",
        "license": facts.license or (entry.license if entry else None) or "",
        "details": _details(file, facts),
        "model_info": _model_info(facts),
        "capabilities": _capabilities(facts),
        "modified_at": _modified_at(file.path),
    }


def _modelfile(base: str, system: str, parameters: dict[str, Any]) -> str:
    """The model and the settings of a preset in Ollama's form."""
    lines = [f"FROM {base}"]
    if system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f"PARAMETER {key} {value}" for key, value in _rows(parameters)]
    return "\n".join(lines) + "\n"


def _rows(parameters: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values as in a Modelfile: a list has a row per value, texts are in quotes."""
    for key, value in parameters.items():
        for each in value if isinstance(value, list) else (value,):
            yield key, _quoted(each) if isinstance(each, str) else str(each)


def _quoted(text: str) -> str:
    # Ollama knows no escapes
    quotes = '"""' if '"' in text else '"'
    return f"{quotes}{text}{quotes}"


def _tag_entry(name: str, file: ModelFile) -> dict[str, Any]:
    try:
        facts = _model_metadata(file)
    except LoadFailed:  # list it anyway: loading it reports the error
        facts = ModelMetadata()
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(file.path),
        "size": file.size_bytes,
        "digest": model_id(file),
        "details": _details(file, facts),
    }


def _ps_entry(resident: ResidentModel) -> dict[str, Any]:
    info = resident.info
    assert info is not None, "not loaded"
    size = free_memory.loaded_model_bytes(info)
    left_s = resident.expires_in_s()
    until_s = time.time() + min(_MAX_DURATION_S, _MAX_DURATION_S if left_s is None else left_s)
    shown = _tag_entry(resident.file.name, resident.file) | {
        "size": size,
        "size_vram": round(size * gpu_fraction(info.processor)),
    }
    del shown["modified_at"]
    return shown | {"expires_at": format_timestamp(until_s), "context_length": info.ctx}


def gpu_fraction(processor: str) -> float:
    """Fraction of a model on GPUs, 0 to 1. processor: see ModelInfo."""
    share = re.search(r"(\d+)% (?:CPU/)?GPU$", processor)
    return int(share[1]) / 100 if share else 0.0


def _model_metadata(file: ModelFile) -> ModelMetadata:
    try:
        return _read_metadata(file, file.path.stat().st_mtime_ns)
    except FileNotFoundError as error:
        raise ModelNotFound(f"{file.name} no longer exists: {file.path}") from error


@lru_cache(maxsize=1024)
def _read_metadata(file: ModelFile, changed_ns: int) -> ModelMetadata:
    return read_metadata(file)


def _details(file: ModelFile, metadata: ModelMetadata) -> dict[str, Any]:
    family = metadata.architecture or ""
    return {
        "parent_model": "",
        "format": "gguf" if file.is_gguf else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _format_parameter_count(metadata.params),
        "quantization_level": metadata.quantization or "",
    }


def _format_parameter_count(count: int | None) -> str:
    """Format as `8.0B` or `494.03M`, as Ollama does."""
    match count:
        case None:
            return ""
        case int() if count >= 1e9:
            return format_params(count)
        case int() if count >= 1e6:
            return f"{count / 1e6:.2f}M"
        case _:
            return str(count)


def _model_info(metadata: ModelMetadata) -> dict[str, Any]:
    known = asdict(metadata)
    family = metadata.architecture
    general = {"general.architecture": family, "general.basename": metadata.title}
    general["general.parameter_count"] = known["params"]
    of_family = {
        f"{family}.{name}": known[ours]
        for name, ours in (
            ("context_length", "context"),
            ("block_count", "layers"),
            ("embedding_length", "hidden"),
            ("vocab_size", "vocab"),
        )
    }
    return {key: value for key, value in (general | of_family).items() if value is not None}


def _capabilities(metadata: ModelMetadata) -> list[str]:
    template = metadata.chat_template or ""
    knows_tools = re.search(r"\btools\b", template) is not None
    thinks = detect_thinking_tags(template) is not None
    return ["completion", *["tools"] * knows_tools, *["thinking"] * thinks]


def _modified_at(path: Path) -> str:
    return format_timestamp(path.stat().st_mtime)
