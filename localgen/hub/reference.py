"""Parse a model name into a hub repository and the selection of its files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from localgen.backends.units import format_size
from localgen.hub import catalog
from localgen.hub.catalog import CatalogEntry, SafetensorsSource
from localgen.hub.quants import AUTO_QUANT, DEFAULT_QUANT

HUB_PREFIXES = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
_REPO_PART = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model on the hub.

    name: as the user wrote it.
    tag: the quantization; None selects the default.
    entry: catalog entry, if any.
    safetensors: set if safetensors are selected instead of GGUF.
    """

    name: str
    repo: str
    tag: str | None = None
    entry: CatalogEntry | None = None
    safetensors: SafetensorsSource | None = None

    @property
    def default_quant(self) -> str:
        """The quantization selected without a tag."""
        return self.entry.gguf.quant if self.entry else DEFAULT_QUANT

    @property
    def is_auto(self) -> bool:
        """True if the best quantization that fits is to be chosen."""
        return self.tag is not None and self.tag.lower() == AUTO_QUANT

    @property
    def description(self) -> str:
        """The files to download: `user/repo:QUANT (4.9 GB)`, with the size if it is known."""
        if self.safetensors is not None:
            return f"{self.repo}{_size_suffix(self.size_bytes)}"
        if self.is_auto:
            return f"the best of {self.repo} that fits"
        return f"{self.repo}:{self.tag or self.default_quant}{_size_suffix(self.size_bytes)}"

    @property
    def size_bytes(self) -> int | None:
        """Size of the files to download, if the catalog has it."""
        if self.safetensors is not None:
            return self.safetensors.size_bytes
        return self.entry.gguf.size(self.tag or self.default_quant) if self.entry else None


def resolve_reference(name: str) -> HubReference | None:
    """Resolve a catalog name or `user/repo[:tag]`. Returns None if it is neither."""
    plain = strip_hub_prefix(name)
    return _from_repo(name, plain) if "/" in plain else _from_catalog(name, plain)


def strip_hub_prefix(name: str) -> str:
    """Remove `hf.co/` or a similar prefix."""
    for prefix in HUB_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _from_repo(name: str, stripped: str) -> HubReference | None:
    repo, _, tag = stripped.partition(":")
    parts = repo.split("/")
    if len(parts) != 2 or not all(_REPO_PART.fullmatch(part) for part in parts):
        return None
    entry = catalog.entry_by_repo(repo)
    folder = None
    if entry is not None and not catalog.same_ignoring_case(repo, entry.gguf.repo):
        folder = next(
            source for source in entry.safetensors if catalog.same_ignoring_case(source.repo, repo)
        )
    elif catalog.same_ignoring_case(tag, "safetensors"):
        folder = SafetensorsSource(repo, "safetensors")
    return HubReference(name, repo, tag or None, entry, folder)


def _from_catalog(name: str, stripped: str) -> HubReference | None:
    found = catalog.find_entry(stripped)
    if found is None:
        return None
    entry, tag = found
    # MXFP4 is the name of a GGUF quantization and of a safetensors method
    is_quant = tag is None or catalog.same_ignoring_case(tag, entry.gguf.quant)
    folder = None if is_quant else entry.safetensors_source(tag or "")
    if folder is not None:
        return HubReference(name, folder.repo, tag, entry, folder)
    return HubReference(name, entry.gguf.repo, tag, entry)


def _size_suffix(size_bytes: int | None) -> str:
    return f" ({format_size(size_bytes)})" if size_bytes else ""
