"""From a model's name to its facts: its files, the hub where it can be reached, or the catalog."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from localgen.backends.errors import InvalidRequest, LoadFailed, LocalgenError, ModelNotFound
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.formats.gguf.header import parse_header
from localgen.backends.formats.gguf.shape import gguf_shape
from localgen.backends.formats.hf.config_shape import config_shape
from localgen.backends.formats.model_facts import Facts, facts_of_file
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import AUTO, NGRAM, NONE
from localgen.hub import quant_choice
from localgen.hub.aliases import aliases
from localgen.hub.catalog import Entry, same
from localgen.hub.hf_client import HubUnavailable, talking
from localgen.hub.quants import pick, quant_of
from localgen.hub.reference import Reference, reference
from localgen.hub.repository import Listing, RemoteFile, beginning, listing
from localgen.hub.resolve import BUILT_IN, is_path, resolve, unknown

Say = Callable[[str], None]
ALL = "all"


def find(name: str | None, quants: Sequence[str], say: Say) -> tuple[list[Facts], list[Facts]]:
    """What is asked for, and all that is known of the same model to choose from.

    quants: which quantizations, `all` for all; none: the one that the name means. Raises
    ModelNotFound, InvalidRequest, LoadFailed, and HubUnavailable where only the hub knows.
    """
    meant, wanted = _meant(name)
    if wanted is None:
        return _here(meant, quants)
    file = None if quants else _file(meant)
    if file is not None:
        return [facts_of_file(file, _quant(file))], _catalog(wanted)
    if wanted.folder is not None and not quants:
        return [_folder(wanted, _listing(wanted, say))], _catalog(wanted)
    found = _listing(wanted, say)
    choices = _catalog(wanted) if found is None else _of_hub(wanted, found)
    chosen = choices if ALL in quants else [_chosen(wanted, q, choices) for q in quants or (None,)]
    return [_as_here(wanted, facts) or facts for facts in chosen], choices


def find_draft(asked: str | None, target: str | None, facts: Facts, say: Say) -> Facts | None:
    """What is asked to draft for a model of that name; None: none is, or the catalog has none.

    Raises what find raises.
    """
    if asked in (None, NGRAM, NONE):
        return None
    if not asked:
        raise InvalidRequest("--draft is empty: give a model, or auto, ngram or none")
    name = _paired(target, facts) if asked == AUTO else asked
    if name is None:
        say(f"the catalog has no draft model for {facts.name}")
        return None
    try:
        return find(name, (), say)[0][0]
    except LocalgenError as error:
        raise type(error)(f"--draft {name}: {error.message}", param="draft") from error


def _paired(target: str | None, facts: Facts) -> str | None:
    """The catalog's draft model for this one, of the same format."""
    _, wanted = _meant(target)
    entry = wanted.entry if wanted else None
    names = entry.draft_names(is_gguf=facts.is_gguf) if entry else ()
    return next(iter(names), None)


def _meant(name: str | None) -> tuple[str, Reference | None]:
    """What a name stands for, as a reference; None: for a file or folder of its own."""
    meant = aliases().get(name or BUILT_IN, name or BUILT_IN)
    return meant, None if meant == BUILT_IN or is_path(meant) else reference(meant)


def _here(meant: str, quants: Sequence[str]) -> tuple[list[Facts], list[Facts]]:
    file = resolve(meant)
    if quants:
        raise InvalidRequest(
            f"--quant: {file.name} is a file, which has one quantization: leave it out, or give "
            "the name of a repository"
        )
    return [facts_of_file(file, _quant(file))], []


def _file(meant: str) -> ModelFile | None:
    try:
        return resolve(meant)
    except ModelNotFound:
        return None


def _quant(file: ModelFile) -> str:
    """As the file's name tells it."""
    if not file.is_gguf:
        return "safetensors"
    found = quant_of(file.path.stem.partition("-00001-of-")[0])
    return "" if found == file.path.stem else found


def _listing(wanted: Reference, say: Say) -> Listing | None:
    """What the repository has; None: out of reach, and the catalog knows it."""
    try:
        with talking(say):
            return listing(wanted.repo, say)
    except HubUnavailable as error:
        if wanted.entry is None:
            raise
        say(f"{error.message}; these are the catalog's facts")
        return None


def _catalog(wanted: Reference) -> list[Facts]:
    """Its GGUF files as the catalog knows them, largest first."""
    if wanted.entry is None:
        return []
    entry = wanted.entry
    sizes = dict(entry.gguf.sizes) or {entry.gguf.quant: 0}
    found = [
        facts_elsewhere(f"{entry.gguf.repo}:{quant}", quant, size, entry)
        for quant, size in sizes.items()
    ]
    return sorted(found, key=lambda facts: -facts.weights_bytes)


def _of_hub(wanted: Reference, found: Listing) -> list[Facts]:
    """The GGUF files of a repository, largest first; of a folder, that alone."""
    models = found.models()
    if not models:
        return [_folder(wanted, found)]
    default = pick(models, wanted.tag, wanted.default_quant) or models[0]
    shape = _shape(found, default.files[0])
    return [
        facts_elsewhere(
            f"{found.repo}:{model.quant}",
            model.quant,
            model.size_bytes,
            wanted.entry,
            shape=shape,
            source="hub",
        )
        for model in reversed(models)
    ]


def _folder(wanted: Reference, found: Listing | None) -> Facts:
    """A model in Hugging Face's format. ModelNotFound: there is none."""
    known = wanted.folder
    quant = known.method if known else "safetensors"
    if found is None:
        size = (known.size_bytes if known else None) or 0
        return facts_elsewhere(wanted.repo, quant, size, wanted.entry, is_gguf=False)
    files = found.folder(known.skip if known else ())
    if not files:
        raise ModelNotFound(
            f"{found.repo} has no .gguf files, nor config.json and safetensors", param="model"
        )
    size = sum(file.size_bytes for file in files if Path(file.path).suffix == ".safetensors")
    config = next(file for file in files if file.path == "config.json")
    shape = _shape(found, config)
    return facts_elsewhere(
        found.repo, quant, size, wanted.entry, shape=shape, is_gguf=False, source="hub"
    )


def _shape(found: Listing, file: RemoteFile) -> ModelShape | None:
    """The shape that the beginning of a file on the hub tells of; None: it does not."""
    try:
        first = beginning(found.repo, found.commit, file.path)
        if file.path.endswith(".json"):
            config = json.loads(first)
            return config_shape(config) if isinstance(config, dict) else None
        return gguf_shape(parse_header(first, file.path))
    except (HubUnavailable, LoadFailed, ValueError):
        return None


def _chosen(wanted: Reference, quant: str | None, choices: list[Facts]) -> Facts:
    """The quantization that is asked for, or that the name means. ModelNotFound."""
    if quant is None and wanted.is_auto:
        return _best(wanted, choices)
    tag = quant or wanted.tag or wanted.default_quant
    found = next((facts for facts in choices if same(facts.quant, tag)), None)
    if found is None and quant is None and wanted.tag is None and len(choices) == 1:
        return choices[0]
    if found is None:
        if not choices:
            raise unknown(wanted.name)
        known = ", ".join(facts.quant for facts in choices)
        raise ModelNotFound(f"{wanted.repo} has no {tag}, there is: {known}", param="model")
    return found


def _best(wanted: Reference, choices: list[Facts]) -> Facts:
    """What `auto` takes. OutOfMemory: nothing fits."""
    ways = [quant_choice.Alternative(facts.quant, facts.weights_bytes) for facts in choices]
    best, _ = quant_choice.choose(ways, wanted.repo, wanted.entry, quant_choice.room_here())
    return next(facts for facts in choices if facts.quant == best.alternative.quant)


def _as_here(wanted: Reference, facts: Facts) -> Facts | None:
    """The same from its own files, where it is here."""
    file = _file(facts.name) if facts.is_gguf else None
    return facts_of_file(file, facts.quant) if file is not None else None


def facts_elsewhere(
    name: str,
    quant: str,
    size_bytes: int,
    entry: Entry | None,
    *,
    shape: ModelShape | None = None,
    is_gguf: bool = True,
    source: str = "catalog",
) -> Facts:
    """Of a model that is not here. shape: from its files on the hub; None: as the catalog has
    it."""
    missing: tuple[str, ...] = () if size_bytes else ("the size of its weights",)
    if shape is None:
        shape = entry.shape if entry else None
        missing += entry.missing if entry else ("the shape of its layers",)
    return Facts(
        name=name,
        quant=quant,
        is_gguf=is_gguf,
        weights_bytes=size_bytes,
        read_bytes=round(size_bytes * _active_share(entry)),
        params=entry.params if entry else None,
        shape=shape,
        source=source,
        missing=missing,
    )


def _active_share(entry: Entry | None) -> float:
    """Which share of the weights one token reads."""
    if entry is None or not entry.params or not entry.active_params:
        return 1.0
    return entry.active_params / entry.params
