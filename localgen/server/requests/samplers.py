"""llama-server's field `samplers`: the samplers that choose a token, in order; others are off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams

# names in the order in which samplers run, each with the values that switch it off
_OFF: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "infill": {"infill_sampler": False},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "adaptive_p": {"adaptive_target": -1.0},
}


def with_only_samplers(params: SamplingParams, names: Sequence[str]) -> SamplingParams:
    """These parameters with only the named samplers.

    Raises InvalidRequest for another order, and with mirostat, which replaces samplers by itself.
    """
    if params.mirostat:
        raise InvalidRequest(
            "samplers cannot be used with mirostat: leave one of them out", param="samplers"
        )
    unknown = [name for name in names if name not in _OFF]
    if unknown:
        raise InvalidRequest(
            f"samplers: unknown sampler {unknown[0]}, use {', '.join(_OFF)}", param="samplers"
        )
    if list(names) != [name for name in _OFF if name in names]:
        raise InvalidRequest(
            f"samplers: their order is fixed, each once: {', '.join(_OFF)}", param="samplers"
        )
    off = [values for name, values in _OFF.items() if name not in names]
    changes = {field: value for values in off for field, value in values.items()}
    return replace(params, **{"infill_sampler": True, **changes})
