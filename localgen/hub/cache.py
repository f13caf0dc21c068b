"""Models in the Hugging Face cache, which are used in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localgen.backends.errors import LoadFailed, ModelNotFound
from localgen.backends.formats.hf.folder import shard_names
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
    """A cached model. path: its first GGUF shard, present or not, or its safetensors folder."""

    repo: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """False for a folder with config.json and safetensors."""
        return self.path.suffix.lower() == ".gguf"

    @property
    def stem(self) -> str:
        """File name without `.gguf` and shard number."""
        return stem_of(self.path)

    @property
    def quant(self) -> str:
        """Quantization suffix of the file name in upper case, else the whole stem."""
        return quants.quant_of(self.stem)

    @property
    def name(self) -> str:
        """`user/repo:QUANT` for GGUF, `user/repo` for a folder."""
        return f"{self.repo}:{self.quant}" if self.is_gguf else self.repo

    def model_file(self) -> ModelFile:
        """Return the model's files. Raises ModelNotFound if some are missing."""
        if self.is_gguf:
            return model_file(self.path, name=self.name, source="cache")
        missing = _missing_weights(self.repo, self.path)
        if missing:
            raise ModelNotFound(
                f"{self.repo} is unfinished, {len(missing)} files are missing ({missing[0]}, …): "
                f"localgen pull {self.repo} downloads them",
                param="model",
            )
        return replace(model_folder(self.path), name=self.name, source="cache")


def scan_hf_cache() -> HFCacheInfo | None:
    """Scan the cache (HF_HUB_CACHE, HF_HOME). Returns None if there is no cache."""
    folder = cache_folder()
    if not folder.exists():
        return None
    import_huggingface_hub()
    # imported late: most requests do not need the cache
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir(folder)
    except CacheNotFound:
        return None


def cached_models() -> list[CachedModel]:
    """Return the cached models, sorted by repository; each from the newest revision that has it."""
    found = scan_hf_cache()
    repos = sorted(found.repos if found else (), key=lambda repo: repo.repo_id)
    return [model for repo in repos if repo.repo_type == "model" for model in _newest_models(repo)]


def _newest_models(repo: CachedRepoInfo) -> Iterator[CachedModel]:
    # an older revision may hold a quantization that was not pulled with the newest one
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


def _missing_weights(repo: str, folder: Path) -> list[str]:
    """Weight files that the folder's index lists but that are not there."""
    try:
        names = shard_names(folder) or []
    except LoadFailed as error:
        raise ModelNotFound(f"{repo} cannot be read: {error.message}", param="model") from error
    return [name for name in names if not (folder / name).is_file()]
