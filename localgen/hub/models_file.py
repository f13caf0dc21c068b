"""models.toml: the user's own names of models. It is read again whenever it changes.

work = "user/repo:Q4_K_M"          an alias
[preset.coder]                     a preset (preset.py)
[adapter.poet]                     an adapter
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.config import BadSetting, ServerSettings
from localgen.hub.packaged import PACKAGED_MODELS
from localgen.hub.preset import Preset, parse_preset
from localgen.toml_store import TomlStore

PRESET_TABLE, ADAPTER_TABLE = "preset", "adapter"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """aliases: the model of each alias, as the user wrote it. adapters: the table of each adapter.

    problem: why a later state of the file could not be read, so that this one is still used; empty
    if it is the latest.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    adapters: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    problem: str = ""

    @property
    def models(self) -> dict[str, str]:
        """The model of each alias and preset; never an alias."""
        of_presets = {
            name: self.aliases.get(preset.model, preset.model)
            for name, preset in self.presets.items()
        }
        return {**self.aliases, **of_presets}

    def require_latest(self) -> None:
        """Raise BadSetting if the file could not be read again."""
        if self.problem:
            raise BadSetting(self.problem)


@dataclass(frozen=True, slots=True)
class _Reading:
    version: tuple[int, ...]
    file: ModelsFile


# the last good state by path: an edit with an error must not take away the names of a server
_readings: dict[Path, _Reading] = {}


def models_store() -> TomlStore:
    """The file, which may not exist. Commands change it while it is locked."""
    path = ServerSettings.from_environment().state_dir / "models.toml"
    return TomlStore(path, "LOCALGEN_STATE_DIR")


def models_file_version() -> tuple[int, ...]:
    """A value that differs after each change of the file."""
    return _version(models_store().path)


def read_models_file() -> ModelsFile:
    """The names as they are now.

    If the file has an error, the last state without one, with the error as `problem`; raises
    BadSetting if this process has read none.
    """
    store = models_store()
    version, last = _version(store.path), _readings.get(store.path)
    if last is not None and last.version == version:
        return last.file
    try:
        file = _parse(store)
    except BadSetting as error:
        if last is None:
            raise
        file = replace(last.file, problem=error.message)
    _readings[store.path] = _Reading(version, file)
    return file


def validate_new_name(name: str, what: str) -> None:
    """Raise InvalidRequest unless the text can be a name of `what`, such as `an alias`."""
    if not _NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        raise InvalidRequest(
            f"{name!r} cannot be {what}: use letters, digits and . _ : - , without / and .gguf"
        )
    if name in PACKAGED_MODELS:
        raise InvalidRequest(f"{name} is the name of a model of localgen: choose another name")
    if name in (PRESET_TABLE, ADAPTER_TABLE):
        raise InvalidRequest(f"{name} cannot be {what}: models.toml uses it: choose another name")


def _version(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _parse(store: TomlStore) -> ModelsFile:
    content = store.read()
    presets = {
        name: _preset(store.path, name, table)
        for name, table in _tables(content, PRESET_TABLE, store.path).items()
    }
    adapters = _tables(content, ADAPTER_TABLE, store.path)
    for name, target in content.items():
        if not isinstance(target, str):
            raise BadSetting(
                f'{store.path}: {name}: expected a model name, as in {name} = "user/repo:Q4_K_M"'
            )
    for name, preset in presets.items():
        if name in content or name in PACKAGED_MODELS:
            other = "an alias" if name in content else "a model of localgen"
            raise BadSetting(f"{store.path}: preset {name} is also {other}: rename one of them")
        if content.get(preset.model, preset.model) in presets:
            raise BadSetting(
                f"{store.path}: preset {name}: {preset.model} is a preset: give its model"
            )
    if alias := next((name for name, target in content.items() if target in presets), None):
        raise BadSetting(f"{store.path}: {alias} is an alias of a preset: give a model")
    return ModelsFile(content, presets, adapters)


def _tables(content: dict[str, Any], kind: str, path: Path) -> dict[str, Any]:
    """Take the tables of a kind out of the content. A string of that name is an alias."""
    found = content.get(kind, {})
    if isinstance(found, str):
        return {}
    content.pop(kind, None)
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise BadSetting(f"{path}: {kind}: expected tables such as [{kind}.NAME]")
    return found


def _preset(path: Path, name: str, table: object) -> Preset:
    try:
        return parse_preset(table)
    except InvalidRequest as error:
        raise BadSetting(f"{path}: preset {name}: {error.message}") from error
