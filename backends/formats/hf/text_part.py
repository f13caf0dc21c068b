"""The text part of a model that also takes images: its config, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localgen.backends.errors import LoadFailed, ModelNotFound
from localgen.backends.formats.architecture.families import WITH_IMAGES
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.hf.safetensors import read_safetensors_header, weight_files

# values of Gemma3TextConfig, which published files omit
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
    }
}


def is_text_part(config: Mapping[str, Any]) -> bool:
    """True if only the text part of the model of this config.json is loaded."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]) in WITH_IMAGES


def with_defaults(text: Mapping[str, Any]) -> dict[str, Any]:
    """A text_config with the values that its class gives to fields that it omits."""
    return {**_DEFAULTS.get(str(text.get("model_type")), {}), **text}


def read_text_config(config: ConfigFields) -> ConfigFields:
    """text_config of a config.json, with defaults. Raises LoadFailed if it is missing."""
    section = config.section("text_config")
    if section is None:
        raise config.load_error("it has no text_config")
    values = with_defaults(section.values)
    # tying is a property of the whole model, whose fields are one level up
    if "tie_word_embeddings" in config:
        values["tie_word_embeddings"] = config.values["tie_word_embeddings"]
    return ConfigFields(config.path, values, section.prefix)


def text_tensor_name(stored: str) -> str | None:
    """Name that a tensor has in a model of text only, or None if it is not part of it.

    stored: as published (language_model.model.…) or as in transformers (model.language_model.…).
    """
    for prefix, replacement in (("language_model.", ""), ("model.language_model.", "model.")):
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored if stored.startswith("lm_head.") else None


def stores_head(folder: Path) -> bool | None:
    """Return True if the checkpoint has lm_head weights; None if it cannot be read."""
    try:
        names = [name for path in weight_files(folder) for name in read_safetensors_header(path)]
    except (LoadFailed, ModelNotFound):
        return None
    return any((text_tensor_name(name) or "").startswith("lm_head.") for name in names)
