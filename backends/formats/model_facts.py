"""Facts of a model that are known before it is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.formats.gguf.header import read_header
from localgen.backends.formats.gguf.shape import gguf_shape
from localgen.backends.formats.hf.config_shape import config_shape
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.formats.weight_sizes import weights_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A model as far as it is known. source: files, hub or catalog.

    read_bytes: of weights, for one token. missing: facts that nobody told; without a shape the
    context cannot be planned. path: of its files here; None: they are not.
    """

    name: str
    quant: str
    is_gguf: bool
    weights_bytes: int
    read_bytes: int
    params: int | None
    shape: ModelShape | None
    source: str
    missing: tuple[str, ...] = ()
    path: str | None = None


def shape_of(file: ModelFile) -> ModelShape | None:
    """A model's shape from the first kilobytes of its files; None: they do not tell it."""
    try:
        if file.is_gguf:
            return gguf_shape(read_header(file.path))
        return config_shape(_config(file))
    except LoadFailed:
        return None


def facts_of_file(file: ModelFile, quant: str) -> Facts:
    """Of a model that is here. LoadFailed: its files are damaged."""
    shape = gguf_shape(read_header(file.path)) if file.is_gguf else config_shape(_config(file))
    weights = weights_of(file, shape)
    return Facts(
        name=file.name,
        quant=quant,
        is_gguf=file.is_gguf,
        weights_bytes=weights.size_bytes,
        read_bytes=weights.read_bytes,
        params=weights.params,
        shape=shape,
        source="files",
        missing=() if shape else ("the shape of its layers",),
        path=str(file.path),
    )


def _config(file: ModelFile) -> dict[str, Any]:
    path = file.path / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise LoadFailed(f"{path} holds no object")
    return found
