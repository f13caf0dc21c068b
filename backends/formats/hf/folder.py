"""JSON files, chat template and sampling defaults of a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localgen.backends.errors import LoadFailed, ModelNotFound
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.sampling_params import SAMPLERS, SamplingParams, model_sampling_defaults

INDEX_FILE = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises ModelNotFound if there is no such file, LoadFailed if it holds no JSON object.
    """
    if not path.exists():
        raise ModelNotFound(f"{path.parent} has no {path.name}")
    return ConfigFields.from_file(path).values


def read_optional_json(path: Path) -> dict[str, Any]:
    """Like read_json; returns an empty object if there is no such file."""
    return ConfigFields.from_file(path).values if path.exists() else {}


def shard_names(folder: Path) -> list[str] | None:
    """Return the file names in the index of a model folder, sorted; None if it has no index.

    Raises LoadFailed if the index is damaged.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return None
    weight_map = ConfigFields.from_file(index).section("weight_map")
    if weight_map is None:
        raise LoadFailed(f"{index} has no weight_map")
    # shards are files of this folder: an index must not lead elsewhere
    return sorted({Path(weight_map.string(tensor)).name for tensor in weight_map.values})


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template of a model folder, or None if it has none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    found = read_optional_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [entry for entry in found if isinstance(entry, dict)]
        found = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    return found if isinstance(found, str) else None


def read_sampling_defaults(folder: Path) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling defaults of generation_config.json, and a note if they are invalid."""
    config = read_optional_json(folder / "generation_config.json")
    # without do_sample, transformers decodes greedily and ignores the rest
    if config.get("do_sample") is False:
        return SamplingParams(temperature=0.0), ()
    return model_sampling_defaults(
        {sampler.name: config.get(sampler.hf_key) for sampler in SAMPLERS if sampler.hf_key}
    )
