"""What a quantization is asked for, as a value and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from localgen.hub.names import is_path
from localgen.quant.recipe import Calibration, Mode, Recipe


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What to measure on. path: None: the text that ships with localgen."""

    path: Path | None = None
    windows: int = 16
    length: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One run. recipe: None: a GGUF file without calibration. mode: what the streamed job does.
    held_out: None: nothing is measured."""

    model: str | None
    recipe: Recipe | None
    gguf: str | None
    mode: Mode
    calibration: Calibration
    out: Path | None
    device: str | None
    resume: bool
    held_out: HeldOut | None


def to_json(asked: Asked) -> bytes:
    """For another process, in one line."""
    return msgspec.json.encode(asked, enc_hook=str)


def from_json(line: bytes) -> Asked:
    """InvalidRequest: a recipe that no format can hold."""
    return msgspec.json.decode(line, type=Asked, dec_hook=lambda kind, value: kind(value))


def usual_out(model: str, recipe: Recipe | None, gguf: str | None) -> Path:
    """Where the result is written if nothing is said, in the folder that one is in.

    model: a name or a path. gguf: a type of GGUF files, if the result is one.
    """
    if is_path(model):
        base = Path(model).expanduser().resolve().name
    else:
        base = model.rpartition("/")[2].removesuffix(":safetensors").replace(":", "-")
    if gguf is not None:
        return Path(f"{base}-{gguf}.gguf")
    assert recipe is not None
    bits = f"-{recipe.bits}bit" if recipe.grouped else ""
    return Path(f"{base}-{recipe.method}{bits}")
