"""What `localgen quantize` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localgen.quant.estimate import Mode
from localgen.quant.recipe import Calibration, Recipe
from localgen.quantizing.verdict import HeldOut


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
