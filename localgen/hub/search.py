"""Search the catalog: which models it has, and which of them fit in this machine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localgen.hub import catalog, packaged, quant_choice
from localgen.hub.cache import CachedModel, cached_models
from localgen.hub.catalog import CatalogEntry
from localgen.hub.quant_choice import AvailableMemory, ProcessorKind, QuantOption


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that can be pulled by its name.

    also: other names. size_bytes: of the default download. need_bytes: memory with a useful
    context. runs_on: None if it does not fit in free memory. None elsewhere: unknown.
    installed: quantizations in the cache.
    """

    name: str
    also: tuple[str, ...]
    title: str
    params: int | None
    size_bytes: int | None
    need_bytes: int | None
    runs_on: ProcessorKind | None
    installed: tuple[str, ...]


def search_catalog(words: Sequence[str], available: AvailableMemory) -> list[FoundModel]:
    """Return smollm2 and the models of the catalog that match all words, in its order.

    A word matches a part of a name, title, license or kind, ignoring case. Reads the cache.
    """
    found = [entry for entry in catalog.catalog_entries() if _matches_entry(entry, words)]
    cached = cached_models()
    first = [_smollm2(available)] if _contains(f"{packaged.SMOLLM2_TITLE} chat", words) else []
    return [*first, *(_found_model(entry, available, cached) for entry in found)]


def _matches_entry(entry: CatalogEntry, words: Sequence[str]) -> bool:
    # `llama-3.1-8b` means llama3.1-8b
    if len(words) == 1 and (known := catalog.find_entry(words[0])) is not None:
        return known[0] is entry or _contains(_searched_text(entry), words)
    return _contains(_searched_text(entry), words)


def _searched_text(entry: CatalogEntry) -> str:
    return " ".join((entry.alias, *entry.names, entry.title, entry.license or "", entry.kind))


def _contains(text: str, words: Sequence[str]) -> bool:
    return all(word.lower() in text.lower() for word in words)


def _found_model(
    entry: CatalogEntry, available: AvailableMemory, cached: list[CachedModel]
) -> FoundModel:
    size = entry.gguf.size(entry.gguf.quant)
    option = QuantOption(entry.gguf.quant, size) if size else None
    fit = quant_choice.fit_quants([option], available, entry)[0] if option else None
    return FoundModel(
        name=entry.alias,
        also=entry.names,
        title=entry.title,
        params=entry.params,
        size_bytes=size,
        need_bytes=fit.need_bytes if fit else None,
        runs_on=fit.place if fit else None,
        installed=tuple(cached_quants(entry, cached)),
    )


def cached_quants(entry: CatalogEntry, cached: Sequence[CachedModel]) -> list[str]:
    """Quantizations of a model in the cache: of its GGUF files, and methods of its safetensors."""
    same = catalog.same_ignoring_case
    found = [model.quant for model in cached if model.is_gguf and same(model.repo, entry.gguf.repo)]
    folders = [model.repo for model in cached if not model.is_gguf]
    return found + [
        source.method
        for source in entry.safetensors
        if any(same(source.repo, repo) for repo in folders)
    ]


def _smollm2(available: AvailableMemory) -> FoundModel:
    option = QuantOption(packaged.SMOLLM2_QUANT, packaged.SMOLLM2_BYTES)
    # the catalog has the same model in other files: its shape decides the memory of the context
    known = catalog.find_entry(packaged.SMOLLM2_IN_CATALOG)
    assert known is not None
    entry, _ = known
    (fit,) = quant_choice.fit_quants([option], available, entry)
    names = [file.name for file in packaged.installed_packaged_models()]
    return FoundModel(
        name=packaged.SMOLLM2,
        also=(),
        title=packaged.SMOLLM2_TITLE,
        params=entry.params,
        size_bytes=option.size_bytes,
        need_bytes=fit.need_bytes,
        runs_on=fit.place,
        installed=(option.quant,) if packaged.SMOLLM2 in names else (),
    )
