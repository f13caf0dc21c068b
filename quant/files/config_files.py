"""What travels along with weights: tokenizer, template, settings, licence, and config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from localgen.backends.formats.hf.folder import read_json

_KINDS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
_NOT = ("config.json",)


def copy_files(folder: Path, into: Path) -> None:
    """All that is neither weights nor config.json nor a model card."""
    for path in sorted(folder.iterdir()):
        wanted = path.suffix.lower() in _KINDS or path.name.upper().startswith(_LEGAL)
        own = path.name in _NOT or path.name.endswith(".safetensors.index.json")
        if path.is_file() and wanted and not own:
            # in the Hugging Face cache it is a link
            shutil.copyfile(path, into / path.name)


def write_config(
    folder: Path, into: Path, *, dtype: torch.dtype, quantization: dict[str, Any] | None
) -> None:
    """The model's config.json with what has changed."""
    config = read_json(folder / "config.json")
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (into / "config.json").write_text(text, encoding="utf-8")
