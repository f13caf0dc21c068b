"""Names of what is here, told from folders alone: for those who cannot wait for the library.

It takes a few milliseconds where `names.available` takes half a second. What it names may still
be incomplete: loading tells.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from localgen.hub import quants
from localgen.hub.files import models_in, stem_of

_PREFIX = "models--"


def cached_names() -> list[str]:
    """`user/repo:QUANT` of each GGUF file in the cache, `user/repo` of each folder of weights."""
    try:
        repos = sorted(_cache().glob(f"{_PREFIX}*"))
    except OSError:
        return []
    return list(dict.fromkeys(name for repo in repos for name in _names(repo)))


def _names(repo: Path) -> Iterator[str]:
    name = repo.name.removeprefix(_PREFIX).replace("--", "/")
    for snapshot in sorted((repo / "snapshots").glob("*")):
        for path in models_in(snapshot.rglob("*.gguf")):
            yield f"{name}:{quants.quant_of(stem_of(path))}"
        if (snapshot / "config.json").exists() and any(snapshot.glob("*.safetensors")):
            yield name


def _cache() -> Path:
    """Where the library would look."""
    folder = _setting("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if folder:
        return Path(os.path.expandvars(folder)).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = _setting("HF_HOME") or f"{base}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def _setting(name: str) -> str | None:
    return os.environ.get(f"LOCALGEN_{name}") or os.environ.get(name)
