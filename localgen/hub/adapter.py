"""A LoRA adapter in models.toml: a name for a model with an adapter's change to its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from localgen.backends.adapters import AdapterRef
from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.hub.latest_tag import without_latest

_FIELDS = ("path", "model", "scale")


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """path: an absolute one, of a GGUF file or of a folder that PEFT has written. model: the model
    that it changes, as the user wrote it. scale: by default, for requests that give none."""

    path: str
    model: str
    scale: float = 1.0

    @property
    def size_bytes(self) -> int:
        """Bytes of its files; 0 if there are none."""
        path = Path(self.path)
        files = path.glob("*.safetensors") if path.is_dir() else (path,)
        return sum(file.stat().st_size for file in files if file.is_file())

    def require_path(self, name: str) -> None:
        """Raise ModelNotFound, before its model is loaded, if there are no files."""
        if not Path(self.path).exists():
            raise ModelNotFound(
                f"adapter {name}: there is no {self.path}: correct its path in models.toml",
                param="model",
            )

    def to_ref(self, name: str, scale: float | None = None) -> AdapterRef:
        """The adapter as a request names it."""
        return AdapterRef(name, self.path, self.scale if scale is None else scale)


def parse_adapter(table: object) -> AdapterEntry:
    """The adapter of a table of models.toml. Raises InvalidRequest, which names the field."""
    if not isinstance(table, dict):
        raise InvalidRequest('expected a table, such as [adapter.poet] with path = "/x/poet.gguf"')
    if unknown := next((name for name in table if name not in _FIELDS), None):
        raise InvalidRequest(f"unknown field {unknown}: fields are {', '.join(_FIELDS)}")
    for name in ("path", "model"):
        if not isinstance(table.get(name), str) or not table[name].strip():
            example = "/x/poet.gguf" if name == "path" else "tiny"
            raise InvalidRequest(f'{name}: give a text, as in {name} = "{example}"')
    path, scale = expand_path(table["path"]), table.get("scale", 1.0)
    if not path.is_absolute():
        raise InvalidRequest(f"path is {table['path']}: give an absolute path, or one with ~")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not _is_finite(scale):
        raise InvalidRequest(f"scale is {scale!r:.30}: give a number")
    return AdapterEntry(str(path), without_latest(table["model"]), float(scale))


def expand_path(text: str) -> Path:
    """The path with a home folder for `~`. Raises InvalidRequest if that is unknown."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidRequest(
            f"path is {text}: the home folder of {Path(text).parts[0]} is unknown: give an "
            "absolute path"
        ) from error


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond the range of floats
        return False
