"""The LoRA adapters of models.toml: add, remove."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from localgen.backends.errors import InvalidRequest, LoadFailed, ModelNotFound
from localgen.hub.adapter import AdapterEntry
from localgen.hub.latest_tag import without_latest
from localgen.hub.models_file import (
    ADAPTER_TABLE,
    add_table,
    models_store,
    read_models_file,
    remove_table,
    validate_new_name,
)
from localgen.hub.resolve import find_target, require_unused_name, resolve_model


def add_adapter(name: str, entry: AdapterEntry) -> None:
    """Add an adapter. Its model may be one that is not installed.

    Raises InvalidRequest if the name is invalid or means something else, ModelNotFound if there are
    no files, LoadFailed if they are not those of an adapter of the model.
    """
    validate_new_name(name, "an adapter")
    find_target(entry.model, allow_paths=True)
    if not Path(entry.path).exists():
        raise ModelNotFound(f"there is no {entry.path}: give a GGUF file or PEFT's folder")
    entry = replace(entry, model=without_latest(entry.model))
    store = models_store()
    with store.locked():
        known = read_models_file()
        known.require_latest()
        if name in known.adapters:
            raise InvalidRequest(
                f"{name} is already an adapter of {known.adapters[name].model}: "
                f"localgen adapter rm {name} removes it, or edit {store.path}"
            )
        for kind, names in (("a preset", known.presets), ("an adapter", known.adapters)):
            if entry.model in names:
                raise InvalidRequest(f"{entry.model} is {kind}: give its model")
        if ADAPTER_TABLE in known.aliases:
            raise InvalidRequest(
                f"{ADAPTER_TABLE} is an alias: `localgen rm {ADAPTER_TABLE}`, then try again"
            )
        require_unused_name(name)
        _require_fits(name, entry)
        store.change(lambda document: add_table(document, ADAPTER_TABLE, name, asdict(entry)))


def _require_fits(name: str, entry: AdapterEntry) -> None:
    # only this command needs it; it imports numpy
    from localgen.backends.llamacpp.adapter_files import check_adapter

    try:
        model = resolve_model(entry.model)
    except ModelNotFound:
        check_adapter(entry.to_ref(name), None)
        return
    if not model.is_gguf:
        raise LoadFailed(
            f"{entry.model} is a folder in Hugging Face's format, which has no adapters: give a "
            "GGUF file of the model"
        )
    check_adapter(entry.to_ref(name), model.path)


def remove_adapter(name: str) -> AdapterEntry:
    """Remove an adapter and return it; its files stay. Raises ModelNotFound if there is none."""
    store = models_store()
    with store.locked():
        known = read_models_file()
        known.require_latest()
        if name not in known.adapters:
            names = ", ".join(known.adapters) or "none"
            raise ModelNotFound(f"{name} is not an adapter; adapters: {names}")
        store.change(lambda document: remove_table(document, ADAPTER_TABLE, name))
    return known.adapters[name]
