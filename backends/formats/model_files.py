"""The files of a model: a GGUF file, its shards, or a folder in Hugging Face's format."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localgen.backends.errors import ModelNotFound

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that can be loaded.

    path: the first or only GGUF file, or the folder of a model in Hugging Face's format.
    size_bytes: of all weight files. source: built-in, package, file, or cache (the Hugging Face
    cache).
    """

    name: str
    path: Path
    size_bytes: int
    shards: tuple[Path, ...]
    source: str

    @property
    def is_gguf(self) -> bool:
        """Otherwise it is a folder with config.json and safetensors."""
        return self.path.suffix.lower() == ".gguf"

    @property
    def identity(self) -> str:
        """Names of the model without its commit: the same after a download of a newer one.

        Elsewhere than in the cache the path.
        """
        if self.source != "cache":
            return str(self.path)
        # a repository may have several files of one quantization, which share a name
        return f"{self.name} {stem_of(self.path) if self.is_gguf else ''}"


def stem_of(path: Path) -> str:
    """Name of a model file without `.gguf` and the shard number."""
    match = _SHARD.match(path.name)
    return match["stem"] if match else path.stem


def shards_of(path: Path) -> tuple[Path, ...]:
    """All shards of the model that a file belongs to, including missing ones."""
    match = _SHARD.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    return tuple(
        path.with_name(f"{match['stem']}-{index:05d}-of-{match['count']}{path.suffix}")
        for index in range(1, count + 1)
    )


def model_file(path: Path, *, name: str | None = None, source: str = "file") -> ModelFile:
    """Return the model of a GGUF file, or of any shard. Raises ModelNotFound if one is missing."""
    shards = shards_of(path)
    missing = [shard for shard in shards if not shard.is_file()]
    if missing and len(shards) == 1:
        raise ModelNotFound(f"there is no file {path}")
    if missing:
        raise ModelNotFound(
            f"{stem_of(path)} has {len(shards)} shards, {len(missing)} missing: {missing[0]}"
        )
    return ModelFile(
        name=name or stem_of(path),
        path=shards[0],
        size_bytes=sum(shard.stat().st_size for shard in shards),
        shards=shards,
        source=source,
    )


def model_folder(folder: Path) -> ModelFile:
    """Return the model of a folder in Hugging Face's format, without checking its files."""
    weights = tuple(sorted(folder.glob("*.safetensors")))
    return ModelFile(
        name=folder.resolve().name,
        path=folder,
        size_bytes=sum(path.stat().st_size for path in weights),
        shards=weights,
        source="file",
    )


def gguf_models_in(paths: Iterable[Path]) -> list[Path]:
    """Return one path per GGUF model among these files, without image projectors and importance
    matrices."""
    first = {
        shards_of(path)[0]: path
        for path in sorted(paths)
        if path.suffix.lower() == ".gguf" and not re.search("mmproj|imatrix", path.name.lower())
    }
    return sorted(first)
