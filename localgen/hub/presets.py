"""The presets of models.toml: add, remove, find."""

from __future__ import annotations

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.formats.model_facts import read_model_shape
from localgen.backends.memory.kv_sizing import require_trained_ctx
from localgen.backends.sampling_params import GRAMMAR_FIELDS
from localgen.backends.text.grammar_check import validate_grammar
from localgen.hub.models_file import (
    PRESET_TABLE,
    add_table,
    models_store,
    read_models_file,
    remove_table,
    validate_new_name,
)
from localgen.hub.preset import Preset, parse_preset
from localgen.hub.resolve import find_target, require_unused_name, resolve_model


def add_preset(name: str, preset: Preset) -> None:
    """Add a preset. The model may be one that is not installed.

    Raises InvalidRequest if the name is invalid or means something else, or for an invalid value.
    """
    validate_new_name(name, "a preset")
    find_target(preset.model, allow_paths=True)
    preset = parse_preset(preset.to_table())  # as it will be read
    _require_trained_ctx(preset)
    for kind in GRAMMAR_FIELDS:
        if (grammar := getattr(preset.params, kind)) is not None:
            validate_grammar(kind, grammar)
    store = models_store()
    with store.locked():
        known = read_models_file()
        known.require_latest()
        if name in known.presets:
            raise InvalidRequest(
                f"{name} is already a preset of {known.presets[name].model}: "
                f"localgen preset rm {name} removes it, or edit {store.path}"
            )
        if preset.model in known.presets:
            raise InvalidRequest(f"{preset.model} is a preset: give its model")
        if PRESET_TABLE in known.aliases:
            raise InvalidRequest(
                f"{PRESET_TABLE} is an alias: `localgen rm {PRESET_TABLE}`, then try again"
            )
        require_unused_name(name)
        store.change(lambda document: add_table(document, PRESET_TABLE, name, preset.to_table()))


def _require_trained_ctx(preset: Preset) -> None:
    """Raise InvalidRequest if the model is installed and was trained for less context."""
    if preset.ctx is None:
        return
    try:
        model = resolve_model(preset.model)
    except ModelNotFound:
        return
    shape = read_model_shape(model)
    if shape is not None and shape.ctx_train:
        require_trained_ctx(preset.ctx, shape.ctx_train, model.name)


def remove_preset(name: str) -> Preset:
    """Remove a preset and return it. Raises ModelNotFound if it does not exist."""
    store = models_store()
    with store.locked():
        known = read_models_file()
        known.require_latest()
        if name not in known.presets:
            names = ", ".join(known.presets) or "none"
            raise ModelNotFound(f"{name} is not a preset; presets: {names}")
        store.change(lambda document: remove_table(document, PRESET_TABLE, name))
    return known.presets[name]
