"""What a user asks of a model."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.model_info import LoadOptions
from localgen.backends.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a user asks of a model: how to load it, how to sample, how to be served."""

    params: SamplingParams = SamplingParams()
    load: LoadOptions = LoadOptions()
    ctx: int | None = None
    system: str | None = None
    priority: int = 0
    keep_alive: str | None = None
    verbose: bool = False
