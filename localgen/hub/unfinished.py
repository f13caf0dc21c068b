"""Unfinished downloads: what was to be downloaded, and how much of it is in the cache.

The cache names incomplete files by their hash only. So a pull writes its plan into the state folder
and removes it when the model is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from localgen.backends.typed_data import decode_json
from localgen.config import ServerSettings
from localgen.hub.download import PullPlan, blob_path
from localgen.hub.hf_client import REPO_PREFIX, cache_folder, repo_name
from localgen.locked_file import LockedFile


@dataclass(frozen=True, slots=True)
class UnfinishedDownload:
    """name: for `localgen pull`. size_bytes: of the whole download, or None if it is another
    program's."""

    name: str
    downloaded_bytes: int
    size_bytes: int | None


def unfinished_downloads() -> list[UnfinishedDownload]:
    """Return the unfinished downloads of the cache, sorted by name."""
    plans = list(_saved_plans())
    found = [
        UnfinishedDownload(plan.name, plan.size_bytes - plan.remaining_bytes, plan.size_bytes)
        for plan in plans
        if plan.size_bytes - plan.remaining_bytes > 0 and not plan.is_cached
    ]
    known = {blob_path(plan.repo, file).name for plan in plans for file in plan.files}
    return sorted([*found, *_other_downloads(known)], key=lambda download: download.name)


def _other_downloads(known: set[str]) -> list[UnfinishedDownload]:
    """Return, by repository, the incomplete files that no plan has. known: hashes of the plans."""
    sizes: dict[str, int] = {}
    for path in cache_folder().glob(f"{REPO_PREFIX}*/blobs/*.incomplete"):
        # other programs insert a suffix between the hash and .incomplete
        if path.name.partition(".")[0] not in known:
            repo = repo_name(path.parents[1])
            with contextlib.suppress(FileNotFoundError):  # it has just been completed
                sizes[repo] = sizes.get(repo, 0) + path.stat().st_size
    return [UnfinishedDownload(repo, size, None) for repo, size in sizes.items() if size]


@contextlib.contextmanager
def recorded_pull(plan: PullPlan) -> Iterator[None]:
    """Keep the plan of a download while it is unfinished, also if this process is killed."""
    path = _plan_path(plan.name)
    with contextlib.suppress(OSError):  # the download matters more than its place in a list
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        LockedFile(path).store(msgspec.json.encode(plan))
    try:
        yield
    finally:
        if plan.is_cached or plan.remaining_bytes == plan.size_bytes:
            _forget(path)


def forget_downloads(repo: str) -> None:
    """Remove the plans of a repository's unfinished downloads."""
    for plan in _saved_plans():
        if plan.repo == repo:
            _forget(_plan_path(plan.name))


def _saved_plans() -> Iterator[PullPlan]:
    for path in _folder().glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            yield decode_json(path.read_bytes(), PullPlan)


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _plan_path(name: str) -> Path:
    return _folder() / f"{name.replace('/', '--').replace(':', '@')}.json"


def _folder() -> Path:
    return ServerSettings.from_environment().state_dir / "downloads"
