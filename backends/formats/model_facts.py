"""Facts of a model that planning needs, read without loading it."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.formats.gguf.reader import read_gguf_header
from localgen.backends.formats.gguf.shape import shape_from_gguf
from localgen.backends.formats.hf.config import shape_from_hf_config
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.formats.weight_sizes import read_weight_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The known facts of a model. source: files, hub or catalog.

    read_bytes: bytes of weights read per token; read_params: their number. expert_bytes: of all
    experts of a mixture of experts; None if unknown. missing: unknown facts; without a shape the
    context cannot be planned. path: local file or folder, or None if the model is not installed.
    """

    name: str
    quant: str
    is_gguf: bool
    weights_bytes: int
    read_bytes: int
    params: int | None
    read_params: int | None = None
    expert_bytes: int | None = None
    shape: ModelShape | None
    source: str
    missing: tuple[str, ...] = ()
    path: str | None = None


def read_model_shape(file: ModelFile) -> ModelShape | None:
    """Return the shape of a model from its header or config.json; None if it cannot be read."""
    try:
        return _read_shape(file)
    except LoadFailed:
        return None


def local_model_facts(file: ModelFile, quant: str) -> ModelFacts:
    """Return the facts of an installed model. Raises LoadFailed if its files are damaged."""
    shape = _read_shape(file)
    weights = read_weight_sizes(file, shape)
    return ModelFacts(
        name=file.name,
        quant=quant,
        is_gguf=file.is_gguf,
        weights_bytes=weights.size_bytes,
        read_bytes=weights.read_bytes,
        params=weights.params,
        read_params=weights.read_params,
        expert_bytes=weights.expert_bytes,
        shape=shape,
        source="files",
        missing=() if shape else ("the shape of its layers",),
        path=str(file.path),
    )


def _read_shape(file: ModelFile) -> ModelShape | None:
    if file.is_gguf:
        return shape_from_gguf(read_gguf_header(file.path))
    return shape_from_hf_config(ConfigFields.from_file(file.path / "config.json").values)
