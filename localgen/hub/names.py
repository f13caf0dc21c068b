"""From what a user calls a model to its files."""

from __future__ import annotations

import difflib
from pathlib import Path

import localgen
from localgen.backends.errors import InvalidRequest, LocalgenError, ModelNotFound
from localgen.hub.cache import CachedModel, cached_models
from localgen.hub.files import ModelFile, model_file, model_folder, models_in

BUILT_IN = "tiny"
BUILT_IN_PATH = Path(localgen.__file__).parent / "models" / "tiny.gguf"
DEFAULT_QUANT = "Q4_K_M"

_HUB_PREFIXES = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")


def resolve(name: str | None) -> ModelFile:
    """The model of a name: None or `tiny`, a path, `[hf.co/]user/repo[:QUANT]`, or a file stem.

    Raises ModelNotFound with what there is and close matches.
    """
    if name is None or name == BUILT_IN:
        return _built_in()
    if not name.strip() or "\0" in name:
        raise InvalidRequest("the name of the model is empty or has a zero byte", param="model")
    if is_path(name):
        return _at_path(Path(name).expanduser())
    return _in_cache(name)


def for_server(name: str | None) -> str | None:
    """The name as a server in another folder understands it: a path becomes absolute."""
    if name is None or not is_path(name):
        return name
    return str(Path(name).expanduser().absolute())


def is_path(name: str) -> bool:
    """Whether a name means a place on disk rather than a repository or a stem."""
    if name.startswith(("/", "./", "../", "~")) or name in (".", ".."):
        return True
    if name.startswith(_HUB_PREFIXES) or name == BUILT_IN or "\0" in name:
        return False
    return name.lower().endswith(".gguf") or ("/" in name and Path(name).exists())


def available() -> list[ModelFile]:
    """Every whole model that can be named without a path: built-in, then the cache."""
    found: list[ModelFile] = []
    if BUILT_IN_PATH.is_file():
        found.append(_built_in())
    for cached in cached_models():
        try:
            found.append(_of_cached(cached))
        except ModelNotFound:
            continue  # a shard is still missing: naming it says which
    return found


def _built_in() -> ModelFile:
    if not BUILT_IN_PATH.is_file():
        raise ModelNotFound(
            f"the built-in model {BUILT_IN_PATH} is missing: install localgen again, "
            "or name another model",
            param="model",
        )
    return model_file(BUILT_IN_PATH, name=BUILT_IN, source="built-in")


def _at_path(path: Path) -> ModelFile:
    try:
        return _in_folder(path) if path.is_dir() else _at_file(path)
    except LocalgenError as error:
        error.param = "model"
        raise
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}", param="model") from error


def _at_file(path: Path) -> ModelFile:
    if path.exists() and path.suffix.lower() != ".gguf":
        raise ModelNotFound(f"{path} is not a .gguf file")
    return model_file(path)


def _in_folder(folder: Path) -> ModelFile:
    models = models_in(folder.glob("*"))
    if not models and (folder / "config.json").is_file():
        return model_folder(folder)
    if not models:
        raise ModelNotFound(
            f"the folder {folder} holds no .gguf file, nor config.json and safetensors"
        )
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise ModelNotFound(f"the folder {folder} holds several models, name one: {names}")
    return model_file(models[0])


def _in_cache(name: str) -> ModelFile:
    cached = cached_models()
    plain = _without_prefix(name)
    if "/" not in plain:
        matches = [model for model in cached if model.stem.lower() == plain.lower()]
        if not matches:
            raise _unknown(name, cached)
        return _of_cached(matches[0])
    repo, _, tag = plain.partition(":")
    quants = [model for model in cached if model.repo.lower() == repo.lower()]
    if not quants:
        raise _unknown(name, cached)
    return _of_cached(_quant_of(quants, tag or DEFAULT_QUANT))


def _without_prefix(name: str) -> str:
    for prefix in _HUB_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _quant_of(models: list[CachedModel], tag: str) -> CachedModel:
    for model in models:
        if model.answers_to(tag):
            return model
    names = ", ".join(model.name for model in models)
    raise ModelNotFound(f"{models[0].repo} has no {tag} here, there is: {names}", param="model")


def _of_cached(cached: CachedModel) -> ModelFile:
    return model_file(cached.path, name=cached.name, source="cache")


def _unknown(name: str, cached: list[CachedModel]) -> ModelNotFound:
    names = [BUILT_IN, *(model.name for model in cached)]
    spellings = {
        spelling.lower(): model.name
        for model in cached
        for spelling in (model.name, model.repo, model.stem)
    } | {BUILT_IN: BUILT_IN}
    close = difflib.get_close_matches(_without_prefix(name).lower(), spellings, n=3, cutoff=0.6)
    hint = ", ".join(dict.fromkeys(spellings[spelling] for spelling in close))
    meant = f" Did you mean {hint}?" if hint else ""
    return ModelNotFound(
        f"no model {name!r} here.{meant} There is: {', '.join(names)}, or give a path to a .gguf",
        param="model",
    )
