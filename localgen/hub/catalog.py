"""The catalog of models with a short name, read from catalog.toml in the package."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from localgen.backends.formats.architecture.model_shape import LayerCacheShape, ModelShape

CATALOG_PATH = Path(__file__).with_name("catalog.toml")
_GB = 1_000_000_000
# the catalog does not have the MLP width, which only affects buffer sizes
_FFN_RATIO = 4


@dataclass(frozen=True, slots=True)
class GgufSource:
    """GGUF repository of an entry. file: name of the default file. sizes: bytes by quantization."""

    repo: str
    quant: str
    file: str
    sizes: Mapping[str, int]

    def size(self, quant: str) -> int | None:
        """Size in bytes of a quantization, or None if it is not in the catalog."""
        return next(
            (size for name, size in self.sizes.items() if same_ignoring_case(name, quant)), None
        )


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """A repository with safetensors. method: quantization method, or safetensors for the original.

    mirror: an ungated copy of a gated repository. skip_patterns: files not to download.
    """

    repo: str
    method: str
    size_bytes: int | None = None
    mirror: str | None = None
    skip_patterns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model in the catalog.

    context: context length it was trained for. active_params: parameters used per token, for a
    mixture of experts. kind: chat, code or reasoning. shape: None if dimensions are missing;
    `missing` lists them.
    """

    alias: str
    title: str
    names: tuple[str, ...]
    gguf: GgufSource
    safetensors: tuple[SafetensorsSource, ...]
    license: str | None = None
    params: int | None = None
    context: int | None = None
    active_params: int | None = None
    shape: ModelShape | None = None
    missing: tuple[str, ...] = ()
    draft: str | None = None
    architecture: str = ""
    kind: str = ""

    def safetensors_source(self, method: str) -> SafetensorsSource | None:
        """Return the repository of a method, or None.

        `awq` also finds `awq-int4`; `safetensors` is the original.
        """
        wanted = method.lower()
        known = (f for f in self.safetensors if wanted in (f.method, f.method.partition("-")[0]))
        return next(known, None)

    def draft_names(self, *, is_gguf: bool) -> tuple[str, ...]:
        """Names of the draft model, first in the target's format; empty if there is none."""
        if self.draft is None:
            return ()
        return (self.draft, f"{self.draft}:safetensors")[:: 1 if is_gguf else -1]


def find_entry(name: str) -> tuple[CatalogEntry, str | None] | None:
    """Return the catalog entry of a name, and the tag after it; None if the name is unknown."""
    whole = _lookup(name)
    if whole is not None:
        return whole, None
    head, colon, tag = name.rpartition(":")
    entry = _lookup(head) if colon else None
    if entry is None:
        return None
    if tag.lower() == "latest":  # Ollama clients append it to names without a tag
        return entry, None
    return (entry, tag) if is_quant_tag(tag) or entry.safetensors_source(tag) else None


def entry_by_repo(repo: str) -> CatalogEntry | None:
    """Return the entry that a repository belongs to, or None."""
    wanted = repo.lower()
    for entry in catalog_entries():
        held = [entry.gguf.repo, *(folder.repo for folder in entry.safetensors)]
        if wanted in (name.lower() for name in held):
            return entry
    return None


def is_quant_tag(text: str) -> bool:
    """Return True if the text after a colon can be a quantization rather than part of a name."""
    return bool(QUANT_PATTERN.fullmatch(text)) or text.lower() in ("auto", "safetensors")


def same_ignoring_case(left: str, right: str) -> bool:
    return left.lower() == right.lower()


# quantization names in file names
QUANT_PATTERN = re.compile(r"(?:UD-)?(?:(?:IQ|TQ|Q)\d\w*|BF16|F16|F32|MXFP4\w*)", re.IGNORECASE)


@cache
def catalog_entries() -> tuple[CatalogEntry, ...]:
    """Return all entries in the order of the file."""
    with CATALOG_PATH.open("rb") as file:
        return tuple(_entry(table) for table in tomllib.load(file)["model"])


def spellings() -> dict[str, str]:
    """All names of the catalog by their spelling in lower case."""
    return {
        name.lower(): name for entry in catalog_entries() for name in (entry.alias, *entry.names)
    }


@cache
def _index() -> dict[str, CatalogEntry]:
    return {
        _normalize_name(name): entry
        for entry in catalog_entries()
        for name in (entry.alias, *entry.names)
    }


def _lookup(name: str) -> CatalogEntry | None:
    plain = _normalize_name(name)
    # llama-3.1-8b means llama3.1-8b, but gemma-31b is not gemma3-1b: try the name as given first
    return _index().get(plain) or _index().get(re.sub(r"^([a-z]+)-(?=\d)", r"\1", plain))


def _normalize_name(name: str) -> str:
    return re.sub(r"[:_]", "-", name.lower())


def _entry(table: dict[str, Any]) -> CatalogEntry:
    shape = table.get("shape", {})
    params, active = table.get("params_b"), table.get("active_b")
    return CatalogEntry(
        alias=table["alias"],
        title=table["title"],
        names=tuple(table.get("also", ())),
        gguf=_gguf(table["gguf"]),
        safetensors=(
            _safetensors(table["safetensors"] | {"method": "safetensors"}),
            *map(_safetensors, table.get("quantized", ())),
        ),
        license=table.get("license"),
        params=round(params * 1e9) if params else None,
        context=shape.get("context"),
        active_params=round(active * 1e9) if active else None,
        shape=_shape(shape),
        missing=tuple(fact for fact in (*_REQUIRED_FACTS, "context") if fact not in shape),
        draft=table.get("draft"),
        architecture=table.get("arch", ""),
        kind=table.get("kind", ""),
    )


def _gguf(table: dict[str, Any]) -> GgufSource:
    sizes = {quant: round(gb * _GB) for quant, gb in table.get("sizes_gb", {}).items()}
    if "size_gb" in table:
        sizes[table["quant"]] = round(table["size_gb"] * _GB)
    if "bytes" in table:
        sizes[table["quant"]] = table["bytes"]
    return GgufSource(table["repo"], table["quant"], table["file"], sizes)


def _safetensors(table: dict[str, Any]) -> SafetensorsSource:
    size_gb = table.get("size_gb")
    return SafetensorsSource(
        repo=table["repo"],
        method=table["method"],
        size_bytes=round(size_gb * _GB) if size_gb else None,
        mirror=table.get("mirror"),
        skip_patterns=tuple(table.get("skip", ())),
    )


_REQUIRED_FACTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")


def _shape(facts: dict[str, Any]) -> ModelShape | None:
    if any(fact not in facts for fact in _REQUIRED_FACTS):
        return None
    layers, every = facts["layers"], facts.get("full_attention_every", 1)
    window = facts.get("sliding_window")
    head = facts["head_dim"]
    full = [(layer + 1) % every == 0 for layer in range(layers)]
    return ModelShape(
        num_layers=layers,
        hidden_size=facts["hidden"],
        active_intermediate_size=_FFN_RATIO * facts["hidden"],
        num_heads=facts["heads"],
        vocab_size=facts["vocab"],
        ctx_train=facts.get("context", 0),
        layer_caches=tuple(
            LayerCacheShape(facts["kv_heads"], head, head, None if is_full else window)
            for is_full in full
            if is_full or window  # other layers keep recurrent state of a fixed size
        ),
        num_experts=facts.get("experts", 0),
        num_active_experts=facts.get("experts_active", 0),
    )
