"""Models in the Hugging Face cache, used in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localgen.backends.errors import ModelNotFound
from localgen.backends.formats.model_files import (
    ModelFile,
    gguf_models_in,
    model_file,
    model_folder,
    stem_of,
)
from localgen.hub import quants
from localgen.hub.hf_client import cache_folder, import_huggingface_hub

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model of a repository. path: where its first shard is, or would be; or the folder of a
    model in Hugging Face's format."""

    repo: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """Or else a folder with config.json and safetensors."""
        return self.path.suffix.lower() == ".gguf"

    @property
    def stem(self) -> str:
        """Its file name without `.gguf` and shard number."""
        return stem_of(self.path)

    @property
    def quant(self) -> str:
        """The quantization its file name ends in, upper case; the whole stem if in none."""
        return quants.quant_of(self.stem)

    @property
    def name(self) -> str:
        """What it is called here: `user/repo:QUANT`, `user/repo` where it is a folder."""
        return f"{self.repo}:{self.quant}" if self.is_gguf else self.repo

    def model_file(self) -> ModelFile:
        """Its files. ModelNotFound: not all of them are here."""
        if self.is_gguf:
            return model_file(self.path, name=self.name, source="cache")
        missing = _missing_weights(self.path)
        if missing:
            raise ModelNotFound(
                f"{self.repo} is not whole, {len(missing)} files are missing, {missing[0]} is one: "
                f"localgen pull {self.repo} fetches them",
                param="model",
            )
        return replace(model_folder(self.path), name=self.name, source="cache")


def scan_hf_cache() -> HFCacheInfo | None:
    """Everything in the cache (HF_HUB_CACHE, HF_HOME); None if there is no cache."""
    import_huggingface_hub()
    # imported late: most requests name no cached model
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir(cache_folder())
    except CacheNotFound:
        return None


def cached_models() -> list[CachedModel]:
    """The models in the cache, by repository; of each the newest revision that has it."""
    found = scan_hf_cache()
    repos = sorted(found.repos if found else (), key=lambda repo: repo.repo_id)
    return [model for repo in repos if repo.repo_type == "model" for model in _newest_models(repo)]


def _newest_models(repo: CachedRepoInfo) -> Iterator[CachedModel]:
    # an older revision may hold a quantization that the newest one was not pulled with
    seen: set[str] = set()
    for revision in sorted(repo.revisions, key=lambda revision: -revision.last_modified):
        for path in gguf_models_in(file.file_path for file in revision.files):
            if stem_of(path) not in seen:
                seen.add(stem_of(path))
                yield CachedModel(repo.repo_id, path)
        if _is_folder(revision) and "" not in seen:
            seen.add("")
            yield CachedModel(repo.repo_id, revision.snapshot_path)


def _is_folder(revision: CachedRevisionInfo) -> bool:
    top = {f.file_name for f in revision.files if f.file_path.parent == revision.snapshot_path}
    return "config.json" in top and any(name.endswith(".safetensors") for name in top)


def _missing_weights(folder: Path) -> list[str]:
    """Files of weights that the folder's index names and that are not there."""
    index = folder / "model.safetensors.index.json"
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotFound(f"{index} cannot be read: {error}", param="model") from error
    return sorted(name for name in named if not (folder / name).is_file())
