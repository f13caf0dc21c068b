"""Which sampling settings make sense, whatever the backend."""

from __future__ import annotations

import math

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import SamplingParams

# field: (lowest, highest) that means something; values outside are refused
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (-1.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 0.5),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "adaptive_target": (-1.0, 1.0),
    "adaptive_decay": (0.0, 0.99),
    "mirostat": (0, 2),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 1.0),
    "repeat_penalty": (1e-3, 100.0),
    "repeat_last_n": (-1, math.inf),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "dry_allowed_length": (0, math.inf),
    "dry_penalty_last_n": (-1, math.inf),
}
# an infinite logit leaves no probabilities
_MAX_BIAS = 1e6
# each is looked up in the whole vocabulary; llama.cpp would cut a longer one without a word
_MAX_SEQUENCE_BREAKERS = 32
_MAX_SEQUENCE_BREAKER_BYTES = 40


def validate_sampling_params(params: SamplingParams) -> None:
    """InvalidRequest for a value out of range or settings that exclude each other."""
    for name, (lowest, highest) in _RANGES.items():
        value = getattr(params, name)
        if not lowest <= value <= highest:  # NaN fails too
            most = "" if highest == math.inf else f" to {highest:g}"
            raise InvalidRequest(f"{name} is {value:g}, it must be {lowest:g}{most}", param=name)
    for token, bias in params.logit_bias.items():
        if not bias <= _MAX_BIAS:  # NaN fails too; -inf is fine and bans the token
            raise InvalidRequest(
                f"logit_bias of token {token} is {bias:g}, it must be a number up to {_MAX_BIAS:g}",
                param="logit_bias",
            )
    _validate_sequence_breakers(params.dry_sequence_breakers or ())
    if params.mirostat and not params.temperature:
        raise InvalidRequest(
            "mirostat cannot be used with temperature 0 (greedy): set one of them",
            param="mirostat",
        )
    if params.mirostat and uses_adaptive_p(params):
        raise InvalidRequest(
            "mirostat and adaptive_target both choose the token: set one of them",
            param="adaptive_target",
        )
    if uses_adaptive_p(params) and not params.temperature:
        raise InvalidRequest(
            "adaptive_target cannot be used with temperature 0 (greedy): set one of them",
            param="adaptive_target",
        )


def _validate_sequence_breakers(breakers: tuple[str, ...]) -> None:
    name = "dry_sequence_breakers"
    if len(breakers) > _MAX_SEQUENCE_BREAKERS:
        raise InvalidRequest(f"more than {_MAX_SEQUENCE_BREAKERS} {name}", param=name)
    for text in breakers:
        if (
            not 0 < len(text.encode(errors="replace")) <= _MAX_SEQUENCE_BREAKER_BYTES
            or "\0" in text
        ):
            raise InvalidRequest(
                f"{name}: {text!r} must be 1 to {_MAX_SEQUENCE_BREAKER_BYTES} bytes without NUL",
                param=name,
            )


# what mirostat decides in place of the truncating samplers
_REPLACED_BY_MIROSTAT = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "dynatemp_range",
)


def reject_mirostat_conflicts(requested: SamplingParams) -> None:
    """InvalidRequest if a request asks for mirostat and, explicitly, for what it replaces."""
    if not requested.mirostat:
        return
    for name in _REPLACED_BY_MIROSTAT:
        if getattr(requested, name) is not None:
            raise InvalidRequest(f"mirostat replaces {name}: leave one of them out", param=name)


def uses_adaptive_p(params: SamplingParams) -> bool:
    """Whether adaptive-p chooses the token."""
    return params.adaptive_target is not None and params.adaptive_target >= 0
