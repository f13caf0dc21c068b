"""What travels along with weights: tokenizer, template, settings, licence, and config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from localgen.backends.formats.hf.folder import read_json

_COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_LICENSE_PREFIXES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
_NOT_COPIED = ("config.json",)


def copy_tokenizer_and_config_files(folder: Path, target: Path) -> None:
    """All that is neither weights nor config.json nor a model card."""
    for path in sorted(folder.iterdir()):
        wanted = path.suffix.lower() in _COPIED_SUFFIXES or path.name.upper().startswith(
            _LICENSE_PREFIXES
        )
        own = path.name in _NOT_COPIED or path.name.endswith(".safetensors.index.json")
        if path.is_file() and wanted and not own:
            # in the Hugging Face cache it is a link
            shutil.copyfile(path, target / path.name)


def write_config(
    folder: Path, target: Path, *, dtype: torch.dtype, quantization: dict[str, Any] | None
) -> None:
    """The model's config.json with what has changed."""
    config = read_json(folder / "config.json")
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
