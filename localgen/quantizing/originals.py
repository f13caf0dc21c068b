"""The models here that can be quantized, told from folders alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localgen.backends.errors import LocalgenError
from localgen.backends.formats.model_files import model_folder
from localgen.hub.aliases import aliases
from localgen.hub.glance import cached_folders
from localgen.hub.names import BUILT_IN, BUILT_IN_PATH, is_path


@dataclass(frozen=True, slots=True)
class Original:
    """A model in 16 bits. source: built-in, cache, here (in this folder) or the name's meaning."""

    name: str
    size_bytes: int
    source: str


def originals() -> list[Original]:
    """By where they are: the built-in model, names of the user's own, the cache, this folder. They
    may still be incomplete, or of a kind that is not known: a look at one tells."""
    found: dict[str, Original] = {}
    for name, folder, source in _folders():
        if name not in found and _is_plain(folder):
            found[name] = Original(name, model_folder(folder).size_bytes, source)
    return list(found.values())


def _folders() -> Iterator[tuple[str, Path, str]]:
    yield BUILT_IN, BUILT_IN_PATH.with_suffix(""), "built-in"
    yield from ((name, Path(meant).expanduser(), meant) for name, meant in _given())
    yield from ((name, folder, "cache") for name, folder in cached_folders())
    for config in sorted(Path().glob("*/config.json")):
        yield f"./{config.parent}", config.parent, "here"


def _given() -> list[tuple[str, str]]:
    """Names of the user's own for folders."""
    try:
        return [(name, meant) for name, meant in aliases().items() if is_path(meant)]
    except LocalgenError:
        return []  # what needs the file says what is wrong with it


def _is_plain(folder: Path) -> bool:
    """Whether it is a model whose weights are not rounded."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        has_weights = any(folder.glob("*.safetensors"))
    except (OSError, ValueError):
        return False
    return has_weights and isinstance(config, dict) and "quantization_config" not in config
