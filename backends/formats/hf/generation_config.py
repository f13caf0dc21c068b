"""A model's own sampling defaults."""

from __future__ import annotations

import math
from typing import Any

from localgen.backends import sampling_params
from localgen.backends.errors import LocalgenError
from localgen.backends.types import BASE_SAMPLING, SamplingParams

# of generation_config.json, by our names
_GENERATION_CONFIG_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}


def parse_generation_config(config: dict[str, Any]) -> tuple[SamplingParams, tuple[str, ...]]:
    """What a generation_config.json says, and notes where that is of no use."""
    # without do_sample, transformers takes the likeliest token and ignores the rest
    if config.get("do_sample") is False:
        return SamplingParams(temperature=0.0), ()
    values: dict[str, Any] = {}
    try:
        for field, key in _GENERATION_CONFIG_KEYS.items():
            value = config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{key} is {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"{key} is {value}")
            values[field] = type(getattr(BASE_SAMPLING, field))(value)
        defaults = SamplingParams(**values)
        sampling_params.validate_sampling_params(defaults.with_defaults(BASE_SAMPLING))
    except (LocalgenError, ValueError) as error:
        # or every request that names no settings of its own would fail
        return SamplingParams(), (f"the model's own sampling defaults are left out: {error}",)
    return defaults, ()
