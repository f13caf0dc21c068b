"""models.toml: the user's own names of models. It is read again whenever it changes.

work = "user/repo:Q4_K_M"          an alias
[preset.coder]                     a preset (preset.py)
[adapter.poet]                     a LoRA adapter (adapter.py)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from localgen.backends.errors import InvalidRequest
from localgen.config import BadSetting, ServerSettings
from localgen.hub.adapter import AdapterEntry, parse_adapter
from localgen.hub.latest_tag import without_latest
from localgen.hub.packaged import PACKAGED_MODELS
from localgen.hub.preset import Preset, parse_preset
from localgen.toml_store import TomlStore

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from tomlkit import TOMLDocument

PRESET_TABLE, ADAPTER_TABLE = "preset", "adapter"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")


_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """aliases: the model of each alias, as the user wrote it.

    problem: why a later state of the file could not be read, so that this one is still used; empty
    if it is the latest.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    adapters: Mapping[str, AdapterEntry] = field(default_factory=dict)
    problem: str = ""

    @property
    def models(self) -> dict[str, str]:
        """The model of each alias, adapter and preset; never one of these."""
        found = dict(self.aliases)
        # a preset may be of an adapter, so these come first
        own = {name: adapter.model for name, adapter in self.adapters.items()}
        own |= {name: preset.model for name, preset in self.presets.items()}
        for name, model in own.items():
            found[name] = found.get(model, model)
        return found

    def adapter_of(self, name: str) -> str | None:
        """The adapter that a name is, or that its preset is of; None if there is none."""
        own = self.presets[name].model if name in self.presets else name
        return own if own in self.adapters else None

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


def models_file_problem() -> str:
    """Why the file cannot be read as it is now; empty if it can."""
    try:
        return read_models_file().problem
    except BadSetting as error:
        return error.message


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


def add_table(document: TOMLDocument, kind: str, name: str, fields: Mapping[str, Any]) -> None:
    """Add a preset or an adapter to the content of the file."""
    import tomlkit

    if kind not in document:
        document[kind] = tomlkit.table(is_super_table=True)
    table = tomlkit.table()
    for field_name, value in fields.items():
        # TOML may change the line ends of several lines, so \r is escaped on one line
        is_long = isinstance(value, str) and "\n" in value and "\r" not in value
        table.add(field_name, tomlkit.string(value, multiline=True) if is_long else value)
    cast("MutableMapping[str, Any]", document[kind])[name] = table


def remove_table(document: TOMLDocument, kind: str, name: str) -> None:
    """Remove a preset or an adapter from the content of the file."""
    tables = cast("MutableMapping[str, Any]", document[kind])
    del tables[name]
    if not tables:
        del document[kind]


def _version(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _parse(store: TomlStore) -> ModelsFile:
    content = store.read()
    presets = _entries(content, PRESET_TABLE, store.path, parse_preset)
    adapters = _entries(content, ADAPTER_TABLE, store.path, parse_adapter)
    for name, target in content.items():
        if not isinstance(target, str):
            raise BadSetting(
                f'{store.path}: {name}: expected a model name, as in {name} = "user/repo:Q4_K_M"'
            )
    aliases = {name: without_latest(target) for name, target in content.items()}
    file = ModelsFile(aliases, presets, adapters)
    # all names before any model, which is looked up among them
    for kind, names in ((PRESET_TABLE, presets), (ADAPTER_TABLE, adapters)):
        for name in names:
            _check_name(store.path, file, kind, name)
    for kind, a_kind, entries in (
        (PRESET_TABLE, "a preset", presets),
        (ADAPTER_TABLE, "an adapter", adapters),
    ):
        for name, entry in entries.items():
            _check_model(store.path, file, kind, name, entry.model)
        if alias := next((name for name, target in aliases.items() if target in entries), None):
            raise BadSetting(f"{store.path}: {alias} is an alias of {a_kind}: give a model")
    return file


def _check_name(path: Path, file: ModelsFile, kind: str, name: str) -> None:
    others = {
        "an alias": name in file.aliases,
        "an adapter": kind == PRESET_TABLE and name in file.adapters,
    }
    if name in PACKAGED_MODELS:
        remedy = _renamed(kind, name)
        raise BadSetting(f"{path}: {kind} {name} is also a model of localgen: {remedy}")
    if other := next((other for other, is_other in others.items() if is_other), None):
        raise BadSetting(f"{path}: {kind} {name} is also {other}: rename one of them")


def _renamed(kind: str, name: str) -> str:
    return f"rename it, as in [{kind}.my-{name}]"


def _check_model(path: Path, file: ModelsFile, kind: str, name: str, model: str) -> None:
    base = file.aliases.get(model, model)
    if base == name:
        raise BadSetting(f"{path}: {kind} {name} has the name of its model: {_renamed(kind, name)}")
    if base in file.presets:
        raise BadSetting(f"{path}: {kind} {name}: {model} is a preset: give its model")
    if kind == ADAPTER_TABLE and base in file.adapters:
        raise BadSetting(f"{path}: {kind} {name}: {model} is an adapter: give its model")


def _entries(
    content: dict[str, Any], kind: str, path: Path, parse: Callable[[object], _Entry]
) -> dict[str, _Entry]:
    found = {}
    for name, table in _tables(content, kind, path).items():
        try:
            found[name] = parse(table)
        except InvalidRequest as error:
            raise BadSetting(f"{path}: {kind} {name}: {error.message}") from error
    return found


def _tables(content: dict[str, Any], kind: str, path: Path) -> dict[str, Any]:
    """Take the tables of a kind out of the content. A string of that name is an alias."""
    found = content.get(kind, {})
    if isinstance(found, str):
        return {}
    content.pop(kind, None)
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise BadSetting(f"{path}: {kind}: expected tables such as [{kind}.NAME]")
    return found
