"""The models that have a short name, from the file that comes with the package."""

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
# the MLP's width is not among the facts; it matters for buffers only
_FFN_RATIO = 4


@dataclass(frozen=True, slots=True)
class GgufSource:
    """Where an entry's GGUF files are. file: the name of the default; sizes: bytes by quant."""

    repo: str
    quant: str
    file: str
    sizes: Mapping[str, int]

    def size(self, quant: str) -> int | None:
        """Bytes of a quantization, where the catalog knows them."""
        return next(
            (size for name, size in self.sizes.items() if same_ignoring_case(name, quant)), None
        )


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """A repository in Hugging Face's format. method: how its weights are stored.

    mirror: an open copy of one that asks for a licence. skip_patterns: files that are not needed.
    """

    repo: str
    method: str
    size_bytes: int | None = None
    mirror: str | None = None
    skip_patterns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model of the catalog. context: tokens it was trained for. active_params: of a mixture of
    experts, those that one token reads. shape: None where the facts are too few, which are then in
    `missing`."""

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

    def safetensors_source(self, method: str) -> SafetensorsSource | None:
        """The repository of a method, `awq` for `awq-int4`; safetensors: the original."""
        wanted = method.lower()
        known = (f for f in self.safetensors if wanted in (f.method, f.method.partition("-")[0]))
        return next(known, None)

    def draft_names(self, *, is_gguf: bool) -> tuple[str, ...]:
        """Names of its draft model, the one of the target's format first; empty: it has none."""
        if self.draft is None:
            return ()
        return (self.draft, f"{self.draft}:safetensors")[:: 1 if is_gguf else -1]


def find_entry(name: str) -> tuple[CatalogEntry, str | None] | None:
    """The entry that a name means, and the tag behind it; None: there is no such name."""
    whole = _lookup(name)
    if whole is not None:
        return whole, None
    head, colon, tag = name.rpartition(":")
    entry = _lookup(head) if colon else None
    if entry is None:
        return None
    if tag.lower() == "latest":  # what Ollama appends to names without a tag
        return entry, None
    return (entry, tag) if is_quant_tag(tag) or entry.safetensors_source(tag) else None


def entry_by_repo(repo: str) -> CatalogEntry | None:
    """The entry whose files a repository holds."""
    wanted = repo.lower()
    for entry in catalog_entries():
        held = [entry.gguf.repo, *(folder.repo for folder in entry.safetensors)]
        if wanted in (name.lower() for name in held):
            return entry
    return None


def is_quant_tag(text: str) -> bool:
    """Whether a text behind a colon can be a quantization, rather than part of a name."""
    return bool(QUANT_PATTERN.fullmatch(text)) or text.lower() in ("auto", "safetensors")


def same_ignoring_case(left: str, right: str) -> bool:
    return left.lower() == right.lower()


# how file names spell the quantization of their weights
QUANT_PATTERN = re.compile(r"(?:UD-)?(?:(?:IQ|TQ|Q)\d\w*|BF16|F16|F32|MXFP4\w*)", re.IGNORECASE)


@cache
def catalog_entries() -> tuple[CatalogEntry, ...]:
    """All of them, in the file's order."""
    with CATALOG_PATH.open("rb") as file:
        return tuple(_entry(table) for table in tomllib.load(file)["model"])


@cache
def _index() -> dict[str, CatalogEntry]:
    return {
        _normalize_name(name): entry
        for entry in catalog_entries()
        for name in (entry.alias, *entry.names)
    }


def _lookup(name: str) -> CatalogEntry | None:
    plain = _normalize_name(name)
    # llama-3.1-8b is llama3.1-8b, but gemma-31b is not gemma3-1b: the name as given comes first
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
            if is_full or window  # the others keep a state of one size
        ),
        num_experts=facts.get("experts", 0),
        num_active_experts=facts.get("experts_active", 0),
    )
