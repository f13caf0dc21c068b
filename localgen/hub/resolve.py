"""Resolve a model name to its files."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
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
from localgen.hub.aliases import load_aliases
from localgen.hub.cache import CachedModel, cached_models
from localgen.hub.packaged import (
    PACKAGED_MODELS,
    default_model,
    installed_packaged_models,
    packaged_model,
)
from localgen.hub.quants import select_quant
from localgen.hub.reference import HUB_PREFIXES, HubReference, resolve_reference, strip_hub_prefix

LATEST_TAG = ":latest"


def resolve_model(name: str | None, *, allow_paths: bool = True) -> ModelFile:
    """Resolve a model name to its files.

    A name is None (the default model), `tiny` (the built-in model), `smollm2`, an alias, a path, a
    catalog name, `[hf.co/]user/repo[:QUANT]`, or a file stem. allow_paths: accept paths other than
    those of aliases.

    Raises ModelNotFound with the command to download it, or the installed models and close matches.
    """
    if name is None:
        return resolve_model(default_model())
    if name in PACKAGED_MODELS:
        return packaged_model(name)
    if not name.strip() or "\0" in name:
        raise InvalidRequest("the model name is empty or contains a zero byte", param="model")
    if not allow_paths and find_alias(name) is None:
        reject_path(name)
        plain = expand_alias(name)
        is_packaged = plain in PACKAGED_MODELS
        return packaged_model(plain) if is_packaged else cached_model(plain).model_file()
    return _resolve_target(expand_alias(name))


def installed_aliases() -> list[tuple[str, ModelFile]]:
    """Return the aliases whose model is installed, with the model. Raises BadSetting."""
    known, found = load_aliases(), []
    cached = cached_models() if known else []
    for alias, target in known.items():
        with contextlib.suppress(LocalgenError):
            found.append((alias, _resolve_target(target.removesuffix(LATEST_TAG), cached)))
    return found


def _resolve_target(name: str, cached: list[CachedModel] | None = None) -> ModelFile:
    """Like resolve_model for a name that is no alias. cached: the cached models, if known."""
    if name in PACKAGED_MODELS:
        return packaged_model(name)
    if is_path(name):
        return _model_at_path(Path(os.path.expanduser(name)))
    return cached_model(name, cached).model_file()


def reject_path(name: str) -> None:
    """Raise InvalidRequest for a path.

    It checks the text only, so that the error does not reveal which files exist.
    """
    steps = {".", ".."} & set(re.split(r"[/\\]", name))
    if steps or name.startswith(("/", "\\", "~")) or name.lower().endswith(".gguf"):
        raise InvalidRequest(
            "give a model name, not a path: `localgen cp PATH NAME` creates an alias",
            param="model",
        )


def expand_alias(name: str) -> str:
    """Return the model of an alias, or the name itself, without `:latest`.

    Ollama clients append `:latest` to names without a tag.
    """
    own = find_alias(name)
    return (name if own is None else load_aliases()[own]).removesuffix(LATEST_TAG)


def find_alias(name: str) -> str | None:
    """Return the alias that a name refers to, with or without `:latest`, or None."""
    known = load_aliases()
    return next((own for own in (name, name.removesuffix(LATEST_TAG)) if own in known), None)


def name_for_server(name: str | None) -> str | None:
    """Make a path absolute, for a server in another working directory."""
    if name is None or not is_path(name):
        return name
    return str(Path(os.path.expanduser(name)).absolute())


def draft_for_server(draft: str | None) -> str | None:
    """Like name_for_server for `--draft`, which may also be a keyword."""
    return draft if draft in DRAFT_KEYWORDS else name_for_server(draft)


def is_path(name: str) -> bool:
    """Return True if a name refers to a path on disk rather than a repository or a stem."""
    if name.startswith(("/", "./", "../", "~")) or name in (".", ".."):
        return True
    if name.startswith(HUB_PREFIXES) or name in PACKAGED_MODELS or "\0" in name:
        return False
    if name and "/" not in name and _is_model_folder(name):
        # catalog names take precedence
        return resolve_reference(name) is None
    return name.lower().endswith(".gguf") or ("/" in name and Path(name).exists())


def _is_model_folder(name: str) -> bool:
    """Return True if it is a folder with a config.json."""
    try:
        return (Path(name) / "config.json").is_file()
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


def cached_model(name: str, cached: list[CachedModel] | None = None) -> CachedModel:
    """Return the cached model of a name, complete or not. Raises ModelNotFound."""
    cached = cached_models() if cached is None else cached
    wanted = resolve_reference(name)
    if wanted is None:
        stems = [m for m in cached if m.is_gguf and m.stem.lower() == name.lower()]
        if not stems:
            raise model_not_found(name, cached)
        return stems[0]
    held = [m for m in cached if catalog.same_ignoring_case(m.repo, wanted.repo)]
    return _select_cached(held, wanted) if held else _raise_not_cached(wanted, cached)


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


def _raise_not_cached(reference: HubReference, cached: list[CachedModel]) -> CachedModel:
    """Raise ModelNotFound with the command to download the model."""
    if reference.entry is None:
        raise model_not_found(
            reference.name, cached, f"`localgen pull {reference.name}` downloads it"
        )
    raise ModelNotFound(
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
    name: str, cached: list[CachedModel] | None = None, remedy: str = ""
) -> ModelNotFound:
    """The error for an unknown name, with close matches and the installed models.

    remedy: how to get this model; by default, how to find one.
    """
    cached = cached_models() if cached is None else cached
    packaged = [model.name for model in installed_packaged_models()]
    names = [*packaged, *(model.name for model in cached)]
    spellings = {
        spelling.lower(): model.name
        for model in cached
        for spelling in (model.name, model.repo, model.stem)
    } | {model: model for model in PACKAGED_MODELS}
    spellings |= catalog.spellings() | {alias.lower(): alias for alias in load_aliases()}
    installed = ", ".join(names) or "none"
    remedy = remedy or "`localgen search` lists models to pull"
    return ModelNotFound(
        f"Model {name!r} not found.{did_you_mean(name, spellings)} Installed: {installed}. "
        f"{remedy}; or give a path: ./folder or file.gguf",
        param="model",
    )


def not_in_catalog(name: str) -> ModelNotFound:
    """The error for a name that cannot be pulled, with close matches of the catalog."""
    return ModelNotFound(
        f"Model {name!r} not found in the catalog.{did_you_mean(name, catalog.spellings())} "
        "`localgen search` lists its models; or pull a repository of the hub: owner/name",
        param="model",
    )


def did_you_mean(name: str, spellings: dict[str, str]) -> str:
    """A question with the names that are close, with a leading space; empty if there are none."""
    close = difflib.get_close_matches(strip_hub_prefix(name).lower(), spellings, n=3, cutoff=0.6)
    hint = ", ".join(dict.fromkeys(spellings[spelling] for spelling in close))
    return f" Did you mean {hint}?" if hint else ""
