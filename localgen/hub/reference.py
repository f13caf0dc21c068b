"""What a name means on the hub: a repository and which of its files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from localgen.hub import catalog
from localgen.hub.catalog import Entry, FolderSource
from localgen.hub.quants import AUTO, DEFAULT_QUANT

HUB_PREFIXES = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
_PART = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reference:
    """name: as it was asked for. tag: which quantization; None: the default.

    entry: what the catalog knows. folder: set where files in Hugging Face's format are meant.
    """

    name: str
    repo: str
    tag: str | None = None
    entry: Entry | None = None
    folder: FolderSource | None = None

    @property
    def default_quant(self) -> str:
        """The quantization that is meant without a tag."""
        return self.entry.gguf.quant if self.entry else DEFAULT_QUANT

    @property
    def is_auto(self) -> bool:
        """Whether the quantization is to be chosen by what fits."""
        return self.tag is not None and self.tag.lower() == AUTO

    @property
    def what(self) -> str:
        """What would be fetched: `user/repo:QUANT (4.9 GB)`, the size where the catalog has it."""
        if self.folder is not None:
            return f"{self.repo}{_in_brackets(self.folder.size_bytes)}"
        if self.is_auto:
            return f"the best of {self.repo} that fits"
        quant = self.tag or self.default_quant
        known = self.entry.gguf.size(quant) if self.entry else None
        return f"{self.repo}:{quant}{_in_brackets(known)}"


def reference(name: str) -> Reference | None:
    """What a name means; None: it is neither in the catalog nor `user/repo[:tag]`."""
    plain = without_prefix(name)
    return _of_repo(name, plain) if "/" in plain else _of_entry(name, plain)


def without_prefix(name: str) -> str:
    """The name without `hf.co/` and its like."""
    for prefix in HUB_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _of_repo(name: str, plain: str) -> Reference | None:
    repo, _, tag = plain.partition(":")
    parts = repo.split("/")
    if len(parts) != 2 or not all(_PART.fullmatch(part) for part in parts):
        return None
    entry = catalog.by_repo(repo)
    folder = None
    if entry is not None and not catalog.same(repo, entry.gguf.repo):
        folder = next(source for source in entry.folders if catalog.same(source.repo, repo))
    elif catalog.same(tag, "safetensors"):
        folder = FolderSource(repo, "safetensors")
    return Reference(name, repo, tag or None, entry, folder)


def _of_entry(name: str, plain: str) -> Reference | None:
    found = catalog.find(plain)
    if found is None:
        return None
    entry, tag = found
    # MXFP4 is both
    is_quant = tag is None or catalog.same(tag, entry.gguf.quant)
    folder = None if is_quant else entry.folder(tag or "")
    if folder is not None:
        return Reference(name, folder.repo, tag, entry, folder)
    return Reference(name, entry.gguf.repo, tag, entry)


def _in_brackets(size_bytes: int | None) -> str:
    return f" ({size_bytes / 1e9:.1f} GB)" if size_bytes else ""
