"""GGUF models in the Hugging Face cache, used in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localgen.hub.files import models_in, stem_of

_QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:IQ|TQ|Q)\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A GGUF model of a repository. path: where its first shard is, or would be."""

    repo: str
    path: Path

    @property
    def stem(self) -> str:
        """Its file name without `.gguf` and shard number."""
        return stem_of(self.path)

    @property
    def quant(self) -> str:
        """The quantization its file name ends in, upper case; the whole stem if in none."""
        match = _QUANT.search(self.stem)
        return match[1].upper() if match else self.stem

    @property
    def name(self) -> str:
        """What it is called here: `user/repo:QUANT`."""
        return f"{self.repo}:{self.quant}"

    def answers_to(self, tag: str) -> bool:
        """Whether `user/repo:tag` means this one."""
        wanted, stem = tag.lower(), self.stem.lower()
        return stem == wanted or bool(re.search(rf"[-._]{re.escape(wanted)}$", stem))


def cached_models() -> list[CachedModel]:
    """GGUF models in the Hugging Face cache (HF_HUB_CACHE, HF_HOME); none if there is no cache."""
    # imported late: most requests name no cached model
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    found: list[CachedModel] = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model":
            revisions = sorted(repo.revisions, key=lambda revision: -revision.last_modified)
            snapshots = [[file.file_path for file in revision.files] for revision in revisions]
            found += _newest(repo.repo_id, snapshots)
    return found


def _newest(repo: str, snapshots: list[list[Path]]) -> Iterator[CachedModel]:
    # an older revision may hold a quantization that the newest one was not pulled with
    seen: set[str] = set()
    for paths in snapshots:
        for path in models_in(paths):
            if stem_of(path) not in seen:
                seen.add(stem_of(path))
                yield CachedModel(repo, path)
