"""Resolve a model name to its files."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from localgen.backends.errors import InvalidRequest, LocalgenError, ModelNotFound
from localgen.backends.formats.model_files import (
    ModelFile,
    gguf_models_in,
    model_file,
    model_folder,
)
from localgen.backends.model_info import DRAFT_KEYWORDS
from localgen.hub import catalog
from localgen.hub.adapter import AdapterEntry
from localgen.hub.cache import CachedModel, cached_models
from localgen.hub.latest_tag import without_latest
from localgen.hub.models_file import read_models_file
from localgen.hub.packaged import (
    PACKAGED_MODELS,
    SMOLLM2,
    default_model,
    installed_packaged_models,
    packaged_model,
)
from localgen.hub.preset import Preset
from localgen.hub.quants import select_quant
from localgen.hub.reference import HUB_PREFIXES, HubReference, resolve_reference, strip_hub_prefix


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """The target of a model name, found without looking for the model.

    text: a packaged model, a name of the catalog, a repository, a file stem or a path, without
    `:latest`. is_path: `text` is a path. alias: the user's alias or preset that the name is, or
    None.
    """

    text: str
    is_path: bool
    alias: str | None = None


def find_target(name: str, *, allow_paths: bool) -> ModelTarget:
    """Return what a name stands for: the only way from a client's name to files.

    allow_paths: True for the user's commands and socket. False for other clients: only an alias may
    stand for a path then, and all else is judged by its text, so neither the result nor an error
    depends on which files exist.

    Raises InvalidRequest if the name is empty, has a zero byte, or is a path that is not allowed.
    """
    if not name.strip() or "\0" in name:
        raise InvalidRequest("the model name is empty or contains a zero byte", param="model")
    if not allow_paths:
        reject_path(name)
    known = _own_names(name)
    own = _known_name(name, known)
    if own is not None:
        return _alias_target(own, known[own])
    plain = without_latest(name)
    return ModelTarget(plain, allow_paths and is_path(plain))


def resolve_model(name: str | None, *, allow_paths: bool = True) -> ModelFile:
    """Resolve a model name to its files.

    A name is None (the default model), `tiny` (the built-in model), `smollm2`, an alias, a preset,
    a path, a catalog name, `[hf.co/]user/repo[:QUANT]`, or a file stem. allow_paths: see
    find_target.

    Raises ModelNotFound with the command to download it, or the installed models and close matches;
    InvalidRequest as find_target.
    """
    if name is None:
        return resolve_model(default_model())
    if name in PACKAGED_MODELS:
        return packaged_model(name)
    return _resolve_target(find_target(name, allow_paths=allow_paths), allow_paths=allow_paths)


def installed_aliases() -> list[tuple[str, ModelFile]]:
    """Return the aliases whose model is installed, with the model. Raises BadSetting."""
    return _installed_of(read_models_file().aliases)


def installed_presets() -> list[tuple[str, ModelFile]]:
    """Return the presets whose model is installed, with the model. Raises BadSetting."""
    known = read_models_file()
    return _installed_of({name: known.models[name] for name in known.presets})


def find_preset(name: str | None) -> Preset | None:
    """The preset that a name is, with or without `:latest`, or None. Raises BadSetting."""
    if name is None or name in PACKAGED_MODELS:
        return None
    presets = read_models_file().presets
    own = _known_name(name, presets)
    return None if own is None else presets[own]


def installed_adapters() -> list[tuple[str, ModelFile]]:
    """Return the adapters whose model is installed, with the model. Raises BadSetting."""
    known = read_models_file()
    return _installed_of({name: known.models[name] for name in known.adapters})


def find_adapter(name: str | None) -> tuple[str, AdapterEntry] | None:
    """The adapter that a name or its preset is, by its own name; None if there is none.

    Raises BadSetting.
    """
    if name is None or name in PACKAGED_MODELS:
        return None
    known = read_models_file()
    own = known.adapter_of(_known_name(name, known.models) or name)
    return None if own is None else (own, known.adapters[own])


def _installed_of(models: Mapping[str, str]) -> list[tuple[str, ModelFile]]:
    found = []
    cached = cached_models() if models else []
    for name, model in models.items():
        with contextlib.suppress(LocalgenError):
            found.append((name, _resolve_target(_alias_target(name, model), cached)))
    return found


def _alias_target(alias: str, model: str) -> ModelTarget:
    plain = without_latest(model)
    # `cp` stores absolute paths: `a/b` is a repository, whatever the current folder has
    return ModelTarget(plain, is_path_text(plain), alias)


def _resolve_target(
    target: ModelTarget, cached: list[CachedModel] | None = None, *, allow_paths: bool = True
) -> ModelFile:
    """The files of a target. cached: the cached models, if known."""
    if target.text in PACKAGED_MODELS:
        return packaged_model(target.text)
    if target.is_path:
        return _model_at_path(Path(os.path.expanduser(target.text)))
    return cached_model(target.text, cached, allow_paths=allow_paths).model_file()


def reject_path(name: str) -> None:
    """Raise InvalidRequest for a path.

    It checks the text only, so that the error does not reveal which files exist.
    """
    plain = without_latest(name)
    steps = {".", ".."} & set(re.split(r"[/\\]", plain))
    if steps or plain.startswith("\\") or is_path_text(plain):
        raise InvalidRequest(
            "give a model name, not a path: `localgen cp PATH NAME` creates an alias",
            param="model",
        )


def expand_alias(name: str) -> str:
    """Return the model of an alias or a preset, or the name itself, without `:latest`."""
    known = _own_names(name)
    own = _known_name(name, known)
    return without_latest(name if own is None else known[own])


def find_alias(name: str) -> str | None:
    """Return the alias or preset that a name is, with or without `:latest`, or None."""
    return _known_name(name, _own_names(name))


def _own_names(name: str) -> Mapping[str, str]:
    """The user's names with their models; none, without reading them, for a packaged model."""
    return {} if name in PACKAGED_MODELS else read_models_file().models


def _known_name(name: str, known: Container[str]) -> str | None:
    return next((own for own in (name, without_latest(name)) if own in known), None)


def require_unused_name(name: str) -> None:
    """Raise InvalidRequest if a name, without `:latest`, already means a model.

    For names that a client chooses: only the user may give such a name another meaning.
    """
    if catalog.find_entry(name) is not None:
        raise InvalidRequest(f"{name} is a name of the catalog: choose another name")
    stems = (model.stem for model in cached_models() if model.is_gguf)
    if find_alias(name) is not None or any(catalog.same_ignoring_case(name, s) for s in stems):
        raise InvalidRequest(f"{name} is the name of another model: choose another name")


def name_for_server(name: str | None, folder: Path = Path()) -> str | None:
    """Make a path absolute, for a server in another working directory. folder: where it starts."""
    if name is None or not is_path(name, folder):
        return name
    return str((folder / os.path.expanduser(name)).absolute())


def draft_for_server(draft: str | None, folder: Path = Path()) -> str | None:
    """Like name_for_server for `--draft`, which may also be a keyword."""
    return draft if draft in DRAFT_KEYWORDS else name_for_server(draft, folder)


def is_path(name: str, folder: Path = Path()) -> bool:
    """Return True if a name refers to a path on disk, from `folder`, rather than a repository or a
    stem.

    It looks at the disk, so a client's name must not get here: see find_target.
    """
    if is_path_text(name):
        return True
    if name.startswith(HUB_PREFIXES) or name in PACKAGED_MODELS or "\0" in name:
        return False
    if name and "/" not in name and _is_model_folder(folder / name):
        # catalog names take precedence
        return resolve_reference(name) is None
    return "/" in name and (folder / name).exists()


def is_path_text(name: str) -> bool:
    """Return True if a name can only be a path."""
    if name.startswith(("/", "./", "../", "~")) or name in (".", ".."):
        return True
    return name.lower().endswith(".gguf") and not name.startswith(HUB_PREFIXES)


def _is_model_folder(path: Path) -> bool:
    """Return True if it is a folder with a config.json."""
    try:
        return (path / "config.json").is_file()
    except OSError:
        return False  # too long for a path


def is_installed(name: str | None) -> bool:
    """Return True if the name can be loaded without a download."""
    try:
        resolve_model(name)
    except ModelNotFound:
        return False
    return True


def installed_models() -> list[ModelFile]:
    """Return the complete models that have a name: packaged ones, then those in the cache."""
    found = installed_packaged_models()
    for cached in cached_models():
        try:
            found.append(cached.model_file())
        except ModelNotFound:
            continue  # incomplete; resolving its name says which files are missing
    return found


def cached_model(
    name: str, cached: list[CachedModel] | None = None, *, allow_paths: bool = True
) -> CachedModel:
    """Return the cached model of a name, complete or not. Raises ModelNotFound.

    allow_paths: whether the error offers a path.
    """
    cached = cached_models() if cached is None else cached
    wanted = resolve_reference(name)
    if wanted is None:
        stems = [m for m in cached if m.is_gguf and m.stem.lower() == name.lower()]
        if not stems:
            raise model_not_found(name, cached, allow_paths=allow_paths)
        return stems[0]
    held = [m for m in cached if catalog.same_ignoring_case(m.repo, wanted.repo)]
    if not held:
        raise _not_cached(wanted, cached, allow_paths)
    return _select_cached(held, wanted)


def _select_cached(cached: list[CachedModel], reference: HubReference) -> CachedModel:
    """Select a model of the repository."""
    folders = [model for model in cached if not model.is_gguf]
    files = [model for model in cached if model.is_gguf]
    if folders and (reference.safetensors is not None or (reference.tag is None and not files)):
        return folders[0]
    if files and reference.is_auto:
        return _best_cached(files, reference)
    chosen = select_quant(files, reference.tag, reference.default_quant)
    if chosen is None:
        names = ", ".join(model.name for model in cached)
        raise ModelNotFound(
            f"{cached[0].repo}: {reference.tag or reference.default_quant} is not installed. "
            f"Installed: {names}; localgen pull {reference.name} downloads it",
            param="model",
        )
    return chosen


def _best_cached(files: list[CachedModel], reference: HubReference) -> CachedModel:
    # imported late: it detects the hardware
    from localgen.hub import quant_choice

    sizes = {model.quant: model.model_file().size_bytes for model in files}
    ways = [quant_choice.QuantOption(quant, size) for quant, size in sizes.items()]
    chosen, _ = quant_choice.choose_quant(
        ways, reference.repo, reference.entry, quant_choice.available_memory()
    )
    return next(model for model in files if model.quant == chosen.option.quant)


def _not_cached(
    reference: HubReference, cached: list[CachedModel], allow_paths: bool
) -> ModelNotFound:
    """The error with the command to download the model."""
    if reference.entry is None:
        remedy = f"`localgen pull {reference.name}` downloads it"
        return model_not_found(reference.name, cached, remedy, allow_paths=allow_paths)
    return ModelNotFound(
        f"{reference.name} is not installed: "
        f"localgen pull {reference.name} downloads {reference.description}",
        param="model",
    )


def _model_at_path(path: Path) -> ModelFile:
    try:
        return _model_in_folder(path) if path.is_dir() else _model_at_file(path)
    except LocalgenError as error:
        error.param = "model"
        raise
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}", param="model") from error


def _model_at_file(path: Path) -> ModelFile:
    if path.exists() and path.suffix.lower() != ".gguf":
        raise ModelNotFound(f"{path} is not a .gguf file")
    return model_file(path)


def _model_in_folder(folder: Path) -> ModelFile:
    models = gguf_models_in(folder.glob("*"))
    if not models and (folder / "config.json").is_file():
        return model_folder(folder)
    if not models:
        raise ModelNotFound(
            f"the folder {folder} has neither .gguf files nor config.json with safetensors"
        )
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise ModelNotFound(f"the folder {folder} has several models, choose one: {names}")
    return model_file(models[0])


def model_not_found(
    name: str,
    cached: list[CachedModel] | None = None,
    remedy: str = "",
    *,
    allow_paths: bool = True,
) -> ModelNotFound:
    """The error for an unknown name, with close matches and the installed models.

    remedy: how to get this model; by default, how to find one. allow_paths: False for clients that
    cannot give a path; they list the installed models themselves.
    """
    cached = cached_models() if cached is None else cached
    packaged = [model.name for model in installed_packaged_models()]
    names = [*packaged, *(model.name for model in cached)]
    spellings = {
        spelling.lower(): model.name
        for model in cached
        for spelling in (model.name, model.repo, model.stem)
    } | {model: model for model in PACKAGED_MODELS}
    spellings |= catalog.spellings() | {own.lower(): own for own in read_models_file().models}
    remedy = remedy or "`localgen search` lists models to pull"
    if allow_paths:
        installed = ", ".join(names) or "none"
        remedy = f"Installed: {installed}. {remedy}; or give a path: ./folder or file.gguf"
    else:
        remedy += "; `localgen list` shows the installed models"
    return ModelNotFound(
        f"Model {name!r} not found.{did_you_mean(name, spellings)} {remedy}", param="model"
    )


def not_in_catalog(name: str) -> ModelNotFound:
    """The error for a name that cannot be pulled, with close matches of the catalog."""
    return ModelNotFound(
        f"Model {name!r} not found in the catalog.{did_you_mean(name, pullable_spellings())} "
        "`localgen search` lists its models; or pull a repository of the hub: owner/name",
        param="model",
    )


def pullable_spellings() -> dict[str, str]:
    """All short names that can be pulled, by their spelling in lower case."""
    return catalog.spellings() | {SMOLLM2: SMOLLM2}


def did_you_mean(name: str, spellings: dict[str, str]) -> str:
    """A question with the names that are close, with a leading space; empty if there are none."""
    close = difflib.get_close_matches(strip_hub_prefix(name).lower(), spellings, n=3, cutoff=0.6)
    hint = ", ".join(dict.fromkeys(spellings[spelling] for spelling in close))
    return f" Did you mean {hint}?" if hint else ""
