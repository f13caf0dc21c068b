"""Find the facts of a model by name: from local files, the hub, or the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localgen.backends.errors import InvalidRequest, LoadFailed, LocalgenError, ModelNotFound
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.formats.gguf.reader import parse_gguf_header
from localgen.backends.formats.gguf.shape import shape_from_gguf
from localgen.backends.formats.hf.config import shape_from_hf_config
from localgen.backends.formats.model_facts import ModelFacts, local_model_facts
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.formats.weight_sizes import folder_quantization
from localgen.backends.model_info import DRAFT_AUTO, DRAFT_NGRAM, DRAFT_NONE
from localgen.hub import quant_choice
from localgen.hub.catalog import CatalogEntry, same_ignoring_case
from localgen.hub.hf_client import HubUnavailable, Notify, forward_warnings
from localgen.hub.packaged import PACKAGED_MODELS, default_model
from localgen.hub.quants import quant_of, select_quant
from localgen.hub.reference import HubReference, resolve_reference
from localgen.hub.repository import RemoteFile, RepoListing, list_repo, read_file_head
from localgen.hub.resolve import expand_alias, is_path, model_not_found, resolve_model

ALL_QUANTS = "all"


def find_model_facts(
    name: str | None, quants: Sequence[str], notify: Notify
) -> tuple[list[ModelFacts], list[ModelFacts]]:
    """Return the facts of the requested models, and of all quantizations to choose from.

    quants: requested quantizations, `all` for all, empty for the one selected by the name. Raises
    ModelNotFound, InvalidRequest, LoadFailed, or HubUnavailable if only the hub has the model.
    """
    target, wanted = _resolve_name(name)
    if wanted is None:
        return _local_facts(target, quants)
    file = None if quants else _installed_file(target)
    if file is not None:
        return [local_model_facts(file, _quant_of_file(file))], _catalog_facts(wanted)
    if wanted.safetensors is not None and not quants:
        return [_safetensors_facts(wanted, _list_repo(wanted, notify))], _catalog_facts(wanted)
    found = _list_repo(wanted, notify)
    choices = _catalog_facts(wanted) if found is None else _hub_facts(wanted, found)
    chosen = (
        choices
        if ALL_QUANTS in quants
        else [_select_facts(wanted, q, choices) for q in quants or (None,)]
    )
    return [_installed_facts(wanted, facts) or facts for facts in chosen], choices


def find_draft_facts(
    requested: str | None, target: str | None, facts: ModelFacts, notify: Notify
) -> ModelFacts | None:
    """Return the facts of the requested draft model.

    Returns None if none is requested or the catalog has none. Raises like find_model_facts.
    """
    if requested in (None, DRAFT_NGRAM, DRAFT_NONE):
        return None
    if not requested:
        raise InvalidRequest("--draft is empty: give a model, or auto, ngram or none")
    name = _catalog_draft(target, facts) if requested == DRAFT_AUTO else requested
    if name is None:
        notify(f"the catalog has no draft model for {facts.name}")
        return None
    try:
        return find_model_facts(name, (), notify)[0][0]
    except LocalgenError as error:
        raise type(error)(f"--draft {name}: {error.message}", param="draft") from error


def _catalog_draft(target: str | None, facts: ModelFacts) -> str | None:
    """Name of the catalog's draft model for the target, in the same format, or None."""
    _, wanted = _resolve_name(target)
    entry = wanted.entry if wanted else None
    names = entry.draft_names(is_gguf=facts.is_gguf) if entry else ()
    return next(iter(names), None)


def _resolve_name(name: str | None) -> tuple[str, HubReference | None]:
    """Expand aliases. The reference is None for packaged models, paths and unknown names."""
    name = name or default_model()
    target = expand_alias(name)
    is_local = target in PACKAGED_MODELS or is_path(target)
    return target, None if is_local else resolve_reference(target)


def _local_facts(name: str, quants: Sequence[str]) -> tuple[list[ModelFacts], list[ModelFacts]]:
    file = resolve_model(name)
    if quants:
        raise InvalidRequest(
            f"--quant: {file.name} is a file with one quantization: leave it out, or use "
            "a repository name"
        )
    return [local_model_facts(file, _quant_of_file(file))], []


def _installed_file(name: str) -> ModelFile | None:
    try:
        return resolve_model(name)
    except ModelNotFound:
        return None


def _quant_of_file(file: ModelFile) -> str:
    """Quantization from the file name, or of a folder from its config.json; empty if unknown."""
    if not file.is_gguf:
        quant = folder_quantization(file.path)
        return "safetensors" if quant is None else quant.method
    found = quant_of(file.path.stem.partition("-00001-of-")[0])
    return "" if found == file.path.stem else found


def _list_repo(reference: HubReference, notify: Notify) -> RepoListing | None:
    """List the repository. Returns None if the hub is unreachable but the catalog has the model."""
    try:
        with forward_warnings(notify):
            return list_repo(reference.repo, notify)
    except HubUnavailable as error:
        if reference.entry is None:
            raise
        notify(f"{error.message}; using the catalog's figures")
        return None


def _catalog_facts(reference: HubReference) -> list[ModelFacts]:
    """GGUF quantizations in the catalog, largest first."""
    if reference.entry is None:
        return []
    entry = reference.entry
    sizes = dict(entry.gguf.sizes) or {entry.gguf.quant: 0}
    found = [
        remote_model_facts(f"{entry.gguf.repo}:{quant}", quant, size, entry)
        for quant, size in sizes.items()
    ]
    return sorted(found, key=lambda facts: -facts.weights_bytes)


def _hub_facts(reference: HubReference, listing: RepoListing) -> list[ModelFacts]:
    """GGUF quantizations of a repository, largest first, or its safetensors model."""
    models = listing.gguf_models()
    if not models:
        return [_safetensors_facts(reference, listing)]
    default = select_quant(models, reference.tag, reference.default_quant) or models[0]
    shape = _read_remote_shape(listing, default.files[0])
    return [
        remote_model_facts(
            f"{listing.repo}:{model.quant}",
            model.quant,
            model.size_bytes,
            reference.entry,
            shape=shape,
            source="hub",
        )
        for model in reversed(models)
    ]


def _safetensors_facts(reference: HubReference, listing: RepoListing | None) -> ModelFacts:
    """Facts of a safetensors model. Raises ModelNotFound if the repository has none."""
    known = reference.safetensors
    quant = known.method if known else "safetensors"
    if listing is None:
        size = (known.size_bytes if known else None) or 0
        return remote_model_facts(reference.repo, quant, size, reference.entry, is_gguf=False)
    files = listing.safetensors_files(known.skip_patterns if known else ())
    if not files:
        raise ModelNotFound(
            f"{listing.repo} has neither .gguf files nor config.json with safetensors",
            param="model",
        )
    size = sum(file.size_bytes for file in files if Path(file.path).suffix == ".safetensors")
    config = next(file for file in files if file.path == "config.json")
    shape = _read_remote_shape(listing, config)
    return remote_model_facts(
        listing.repo, quant, size, reference.entry, shape=shape, is_gguf=False, source="hub"
    )


def _read_remote_shape(listing: RepoListing, file: RemoteFile) -> ModelShape | None:
    """Read the model shape from the beginning of a file on the hub. Returns None if that fails."""
    try:
        first = read_file_head(listing.repo, listing.commit, file.path)
        if file.path.endswith(".json"):
            return shape_from_hf_config(ConfigFields.parse(first, Path(file.path)).values)
        return shape_from_gguf(parse_gguf_header(first, file.path))
    except (HubUnavailable, LoadFailed):
        return None


def _select_facts(
    reference: HubReference, quant: str | None, candidates: list[ModelFacts]
) -> ModelFacts:
    """Select the requested or default quantization. Raises ModelNotFound."""
    if quant is None and reference.is_auto:
        return _best_facts(reference, candidates)
    tag = quant or reference.tag or reference.default_quant
    found = next((facts for facts in candidates if same_ignoring_case(facts.quant, tag)), None)
    if found is None and quant is None and reference.tag is None and len(candidates) == 1:
        return candidates[0]
    if found is None:
        if not candidates:
            raise model_not_found(reference.name)
        known = ", ".join(facts.quant for facts in candidates)
        raise ModelNotFound(f"{reference.repo} has no {tag}. Available: {known}", param="model")
    return found


def _best_facts(reference: HubReference, candidates: list[ModelFacts]) -> ModelFacts:
    """Select the quantization for `auto`. Raises OutOfMemory if none fits."""
    ways = [quant_choice.QuantOption(facts.quant, facts.weights_bytes) for facts in candidates]
    best, _ = quant_choice.choose_quant(
        ways, reference.repo, reference.entry, quant_choice.available_memory()
    )
    return next(facts for facts in candidates if facts.quant == best.option.quant)


def _installed_facts(reference: HubReference, facts: ModelFacts) -> ModelFacts | None:
    """Facts from the local file, if the model is installed."""
    file = _installed_file(facts.name) if facts.is_gguf else None
    return local_model_facts(file, facts.quant) if file is not None else None


def remote_model_facts(
    name: str,
    quant: str,
    size_bytes: int,
    entry: CatalogEntry | None,
    *,
    shape: ModelShape | None = None,
    is_gguf: bool = True,
    source: str = "catalog",
) -> ModelFacts:
    """Facts of a model that is not installed. shape: from the hub, or None for that of the
    catalog."""
    missing: tuple[str, ...] = () if size_bytes else ("the size of its weights",)
    if shape is None:
        shape = entry.shape if entry else None
        missing += entry.missing if entry else ("the shape of its layers",)
    return ModelFacts(
        name=name,
        quant=quant,
        is_gguf=is_gguf,
        weights_bytes=size_bytes,
        read_bytes=round(size_bytes * _active_fraction(entry)),
        params=entry.params if entry else None,
        read_params=(entry.active_params or entry.params) if entry else None,
        shape=shape,
        source=source,
        missing=missing,
    )


def _active_fraction(entry: CatalogEntry | None) -> float:
    """Fraction of the weights read per token."""
    if entry is None or not entry.params or not entry.active_params:
        return 1.0
    return entry.active_params / entry.params
