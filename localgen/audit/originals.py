"""The original of a GGUF model: the same model on this machine in 16 or 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

from localgen.backends.errors import InvalidRequest, ModelNotFound, OutOfMemory
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.memory.system import available_memory_bytes
from localgen.backends.units import format_size
from localgen.config import BUILT_IN_MODEL
from localgen.hub.metadata import read_metadata
from localgen.hub.packaged import SMOLLM2, SMOLLM2_IN_CATALOG
from localgen.hub.resolve import expand_alias, is_path, resolve_model

# types of an original, the best first
_ORIGINAL_TYPES = ("BF16", "F16", "F32", "Q8_0")


def reference_note(file: ModelFile) -> str | None:
    """A note about a reference that was rounded itself; None for an original."""
    kind = read_metadata(file).quantization
    if kind is None or kind in _ORIGINAL_TYPES:
        return None
    return f"{file.name} is {kind}, no original in 16 or 8 bits: it has errors of its own"


def require_gguf(name: str | None) -> ModelFile:
    """The GGUF file of a model. Raises ModelNotFound as resolve_model, InvalidRequest for a
    folder."""
    file = resolve_model(name)
    if not file.is_gguf:
        raise InvalidRequest(
            f"{file.name} is a folder, audit reads GGUF files: localgen quantize --gguf F16 "
            "converts an original, localgen quantize --compare evaluates folders",
            param="model",
        )
    return file


def find_original(name: str, file: ModelFile) -> ModelFile:
    """The original of a model, among those on this machine.

    Raises InvalidRequest with the command that downloads one.
    """
    base = _name_without_type(name)
    if base is None:
        raise InvalidRequest(
            f"{name} is a path, which does not tell its original: name that with --reference "
            "MODEL, or compare KV types with --kv, which needs none",
            param="reference",
        )
    for kind in _ORIGINAL_TYPES:
        try:
            found = resolve_model(f"{base}:{kind}")
        except (ModelNotFound, InvalidRequest):
            continue
        if found.is_gguf and found.path != file.path:
            return found
    if base == BUILT_IN_MODEL:
        raise InvalidRequest(
            f"{name} is itself an original of 16 bits: --kv compares its KV types",
            param="reference",
        )
    raise InvalidRequest(
        f"no original of {name} in 16 or 8 bits is on this machine: localgen pull {base}:Q8_0 "
        "downloads one; name another with --reference MODEL, or compare KV types with --kv, which "
        "needs none",
        param="reference",
    )


def require_memory(files: Sequence[ModelFile]) -> None:
    """Raise OutOfMemory if models do not fit in the free memory together."""
    need, free = sum(file.size_bytes for file in files), available_memory_bytes()
    if need > free:
        raise OutOfMemory(
            f"{' and '.join(file.name for file in files)} take {format_size(need)} together, "
            f"{format_size(free)} are free: close other programs, or use a --reference in 8 bits"
        )


def _name_without_type(name: str) -> str | None:
    """None for a path, whose original has no name."""
    plain = expand_alias(name)
    if plain == SMOLLM2:
        return SMOLLM2_IN_CATALOG
    return None if is_path(plain) else plain.partition(":")[0]
