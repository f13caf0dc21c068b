"""User-defined model aliases, stored as `name = "model"` lines in a TOML file."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.config import BadSetting, ServerSettings
from localgen.hub import catalog
from localgen.hub.packaged import PACKAGED_MODELS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")


def aliases_path() -> Path:
    """Path of the aliases file, which may not exist."""
    return ServerSettings.from_environment().state_dir / "models.toml"


def load_aliases() -> dict[str, str]:
    """Return the model of each alias, as the user wrote it. Raises BadSetting."""
    path = aliases_path()
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadSetting(f"{path}: {error}: correct it or remove it") from error
    for name, target in found.items():
        if not isinstance(target, str):
            raise BadSetting(
                f'{path}: {name}: expected a model name, as in {name} = "user/repo:Q4_K_M"'
            )
    return found


def add_alias(name: str, target: str) -> None:
    """Add an alias. Raises InvalidRequest if the name is invalid or that of another model."""
    if not _NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        raise InvalidRequest(
            f"{name!r} cannot be an alias: use letters, digits and . _ : - , without / and .gguf"
        )
    if name in PACKAGED_MODELS or catalog.find_entry(name) is not None:
        raise InvalidRequest(f"{name} is the name of a model of localgen: choose another name")
    taken = load_aliases().get(name)
    if taken is not None:
        raise InvalidRequest(
            f"{name} is already an alias of {taken}: localgen rm {name} removes it"
        )
    path = aliases_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    ended = kept if not kept or kept.endswith("\n") else kept + "\n"
    _write(path, f"{ended}{_quote(name)} = {_quote(target)}\n")


def remove_alias(name: str) -> None:
    """Remove an alias.

    Raises ModelNotFound if it does not exist, InvalidRequest if the file must be edited by hand.
    """
    path = aliases_path()
    known = load_aliases()
    if name not in known:
        raise ModelNotFound(f"{name} is not an alias")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = "".join(line for line in lines if not _defines(line, name))
    try:
        left = tomllib.loads(kept)
    except tomllib.TOMLDecodeError:
        left = known
    if left != {other: target for other, target in known.items() if other != name}:
        raise InvalidRequest(f"{path} defines {name} over several lines: edit it by hand")
    _write(path, kept)


def _defines(line: str, name: str) -> bool:
    try:
        return name in tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False


def _quote(text: str) -> str:
    # a JSON string is a TOML string too
    return json.dumps(text)


def _write(path: Path, text: str) -> None:
    # write atomically: another process may be reading the file
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise BadSetting(f"cannot write {path}: {error.strerror}") from error
