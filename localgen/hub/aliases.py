"""User-defined model aliases, stored as `name = "model"` lines in a TOML file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.config import BadSetting, ServerSettings
from localgen.hub.packaged import PACKAGED_MODELS
from localgen.toml_store import TomlStore, toml_string

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")


def aliases_path() -> Path:
    """Path of the aliases file, which may not exist."""
    return ServerSettings.from_environment().state_dir / "models.toml"


def load_aliases() -> dict[str, str]:
    """Return the model of each alias, as the user wrote it. Raises BadSetting."""
    store = _store()
    found = store.read()
    for name, target in found.items():
        if not isinstance(target, str):
            raise BadSetting(
                f'{store.path}: {name}: expected a model name, as in {name} = "user/repo:Q4_K_M"'
            )
    return found


def add_alias(name: str, target: str) -> None:
    """Add an alias. Raises InvalidRequest if the name is invalid or that of another model."""
    if not _NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        raise InvalidRequest(
            f"{name!r} cannot be an alias: use letters, digits and . _ : - , without / and .gguf"
        )
    if name in PACKAGED_MODELS:
        raise InvalidRequest(f"{name} is the name of a model of localgen: choose another name")
    store = _store()
    with store.locked():
        taken = load_aliases().get(name)
        if taken is not None:
            raise InvalidRequest(
                f"{name} is already an alias of {taken}: localgen rm {name} removes it"
            )
        store.append(f"{toml_string(name)} = {toml_string(target)}\n")


def remove_alias(name: str) -> None:
    """Remove an alias.

    Raises ModelNotFound if it does not exist, InvalidRequest if the file must be edited by hand.
    """
    store = _store()
    with store.locked():
        if name not in load_aliases():
            raise ModelNotFound(f"{name} is not an alias")
        lines = store.read_text().splitlines(keepends=True)
        kept = "".join(line for line in lines if not _defines(line, name))
        if not store.remove(name, kept):
            raise InvalidRequest(f"{store.path} defines {name} over several lines: edit it by hand")


def _store() -> TomlStore:
    return TomlStore(aliases_path(), "LOCALGEN_STATE_DIR")


def _defines(line: str, name: str) -> bool:
    try:
        return name in tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
