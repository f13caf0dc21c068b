"""Resolve model names to folders of original weights, and list the originals on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from localgen.backends.errors import LoadFailed, LocalgenError, ModelNotFound
from localgen.backends.formats.hf.folder import read_json
from localgen.backends.formats.model_files import ModelFile, model_folder
from localgen.config import BUILT_IN_MODEL
from localgen.hub.aliases import load_aliases
from localgen.hub.cache_scan import cached_folders
from localgen.hub.packaged import BUILT_IN_PATH
from localgen.hub.resolve import expand_alias, is_path, resolve_model

_PACKAGES = ("torch", "tokenizers")
_SAFETENSORS_TAG = ":safetensors"


def require_packages(find_module: Callable[[str], object] = find_spec) -> None:
    """Raise LoadFailed if packages that quantization needs are not installed."""
    missing = [name for name in _PACKAGES if find_module(name) is None]
    if missing:
        raise LoadFailed(
            f"quantize needs {' and '.join(missing)}, not installed here: "
            "pip install 'localgen[quant]'"
        )


def resolve_original(name: str | None) -> tuple[str, Path]:
    """Name of a model, and its folder with config.json and safetensors.

    A name with a folder and a GGUF file means the folder. Raises ModelNotFound with the command
    that downloads it.
    """
    if name is None or expand_alias(name) == BUILT_IN_MODEL:
        return BUILT_IN_MODEL, _built_in_folder()
    file = _original_file(name)
    if file.is_gguf:
        raise ModelNotFound(
            f"{name} is a GGUF file, which is already quantized or converted: name the original, a "
            "folder with config.json and safetensors",
            param="model",
        )
    return (name if not is_path(name) else file.name), file.path


def resolve_any_format(name: str) -> tuple[str, Path]:
    """Name of a model, and its folder or GGUF file, quantized or not. Raises ModelNotFound."""
    if expand_alias(name) == BUILT_IN_MODEL and BUILT_IN_PATH.with_suffix("").is_dir():
        return BUILT_IN_MODEL, _built_in_folder()
    file = resolve_model(name)
    return file.name if is_path(name) else name, file.path


def _original_file(name: str) -> ModelFile:
    plain = expand_alias(name)
    if is_path(plain) or ":" in plain:
        return resolve_model(name)
    try:
        return resolve_model(plain + _SAFETENSORS_TAG)
    except ModelNotFound as missing:
        try:
            found = resolve_model(name)
        except ModelNotFound as error:
            # prefer the message that names a download command
            raise (missing if "localgen pull" in missing.message else error) from None
        if found.is_gguf and "localgen pull" in missing.message:
            raise ModelNotFound(
                f"only a GGUF file of {name} is installed, already quantized or converted: "
                f"localgen pull {plain}{_SAFETENSORS_TAG} downloads the original",
                param="model",
            ) from None
        return found


def _built_in_folder() -> Path:
    folder = BUILT_IN_PATH.with_suffix("")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"the original weights of {BUILT_IN_MODEL} come with localgen's repository, "
            "not with the installed package: name another model",
            param="model",
        )
    return folder


@dataclass(frozen=True, slots=True)
class OriginalModel:
    """An unquantized model. source: built-in, cache, here (this folder) or an alias's path."""

    name: str
    size_bytes: int
    source: str


def scan_originals() -> list[OriginalModel]:
    """The built-in model, aliases, the cache, this folder, in this order. Models may be incomplete
    or of an unknown architecture; a dry run reports it."""
    found: dict[str, OriginalModel] = {}
    for name, folder, source in _folders():
        if name not in found and _is_unquantized(folder):
            file = model_folder(folder)
            if file.shards:
                found[name] = OriginalModel(name, file.size_bytes, source)
    return list(found.values())


def _folders() -> Iterator[tuple[str, Path, str]]:
    yield BUILT_IN_MODEL, BUILT_IN_PATH.with_suffix(""), "built-in"
    yield from (
        (name, Path(os.path.expanduser(target)), target) for name, target in _alias_folders()
    )
    yield from ((name, folder, "cache") for name, folder in cached_folders())
    for config in sorted(Path().glob("*/config.json")):
        yield f"./{config.parent}", config.parent, "here"


def _alias_folders() -> list[tuple[str, str]]:
    try:
        return [(name, target) for name, target in load_aliases().items() if is_path(target)]
    except LocalgenError:
        return []  # commands that need the file report the error


def _is_unquantized(folder: Path) -> bool:
    try:
        config = read_json(folder / "config.json")
    except LocalgenError:
        return False
    return "quantization_config" not in config
