"""User-defined model aliases, stored as `name = "model"` lines in models.toml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.hub.latest_tag import without_latest
from localgen.hub.models_file import models_store, read_models_file, validate_new_name


def aliases_path() -> Path:
    """Path of the aliases file, which may not exist."""
    return models_store().path


def load_aliases() -> Mapping[str, str]:
    """Return the model of each alias, as the user wrote it. Raises BadSetting."""
    return read_models_file().aliases


def add_alias(name: str, target: str) -> None:
    """Add an alias. Raises InvalidRequest if the name is invalid or that of another model."""
    validate_new_name(name, "an alias")
    target = without_latest(target)
    store = models_store()
    with store.locked():
        known = read_models_file()
        known.require_latest()
        if name in known.aliases:
            raise InvalidRequest(
                f"{name} is already an alias of {known.aliases[name]}: "
                f"localgen rm {name} removes it"
            )
        for kind, names in (("a preset", known.presets), ("an adapter", known.adapters)):
            if name in names:
                raise InvalidRequest(f"{name} is {kind}: localgen rm {name} removes it")
            if target in names:
                raise InvalidRequest(
                    f"{target} is {kind}: an alias is of a model, such as {known.models[target]}"
                )
        store.change(lambda document: document.update({name: target}))


def remove_alias(name: str) -> None:
    """Remove an alias. Raises ModelNotFound if it does not exist."""
    store = models_store()
    with store.locked():
        known = read_models_file()
        known.require_latest()
        if name not in known.aliases:
            raise ModelNotFound(f"{name} is not an alias")
        store.change(lambda document: document.pop(name))
