"""Sampling parameters by name, as `/set parameter` takes and `/show parameters` gives them."""

from __future__ import annotations

import difflib
import math
import shlex
import types
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from localgen.backends import sampling_params
from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import BASE_SAMPLING, SAMPLERS, SamplingParams

# logprobs have nowhere to be shown in a chat
PARAMETER_NAMES = tuple(field.name for field in fields(SamplingParams) if field.name != "logprobs")
PARAMETER_ALIASES = {"n": "max_tokens", "num_predict": "max_tokens"} | {
    alias: sampler.name for sampler in SAMPLERS for alias in sampler.aliases
}
_UNSET_WORDS = ("default", "none", "unset")


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


def with_parameter(
    params: SamplingParams, name: str, text: str, *, validate: bool = False
) -> SamplingParams:
    """The parameters with one set from text; `default` unsets it. InvalidRequest says what fits.

    validate: whether it has to make sense to our engines; other servers have rules of their own.
    """
    field = resolve_parameter_name(name)
    default = getattr(SamplingParams(), field)
    value: Any = default if text.lower() in _UNSET_WORDS else _parse_value(field, text)
    changed = replace(params, **{field: value})
    if validate and value != default:  # what is taken back cannot make it worse
        sampling_params.validate_sampling_params(changed.with_defaults(BASE_SAMPLING))
        sampling_params.reject_mirostat_conflicts(changed)
    return changed


def resolve_parameter_name(name: str) -> str:
    """The field of a name as a user writes it (`top-k`, `temp`)."""
    asked = name.lower().lstrip("-").replace("-", "_")
    found = PARAMETER_ALIASES.get(asked, asked)
    if found in PARAMETER_NAMES:
        return found
    close = difflib.get_close_matches(found, PARAMETER_NAMES, n=1)
    hint = f", did you mean {close[0]}?" if close else f": there is {', '.join(PARAMETER_NAMES)}"
    raise InvalidRequest(f"no parameter {name!r}{hint}", param="parameter")


def effective_parameters(
    params: SamplingParams,
    model_defaults: SamplingParams,
    fallback_defaults: SamplingParams = BASE_SAMPLING,
) -> list[tuple[str, str, str]]:
    """Name, value in force and whose it is (yours, the model's, or that of base) of each one."""
    table = []
    for name in PARAMETER_NAMES:
        sources = ((params, "yours"), (model_defaults, "model"), (fallback_defaults, ""))
        owner, whose = next(
            ((source, whose) for source, whose in sources if _is_set(getattr(source, name))),
            (fallback_defaults, ""),
        )
        table.append((name, _format_value(getattr(owner, name)), whose))
    return table


def parse_logit_bias(pairs: Iterable[str]) -> dict[int, float]:
    """Biases of `ID=BIAS` pairs. InvalidRequest: not such a pair."""
    biases = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            wanted = "give ID=BIAS, such as 15043=-1.5"
            raise InvalidRequest(f"logit bias {pair!r}: {wanted}", param="logit_bias") from error
        if not math.isfinite(biases[int(token)]):
            wanted = f"give a finite number; {token}=-100 bans the token"
            raise InvalidRequest(f"logit bias {pair!r}: {wanted}", param="logit_bias")
    return biases


def _parse_value(field: str, text: str) -> Any:
    kind = _field_types()[field]
    if field == "logit_bias":
        return parse_logit_bias(text.replace(",", " ").split())
    if kind is bool:
        return _parse_bool(field, text)
    if kind is tuple:
        return _parse_words(field, text)
    try:
        value = kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise InvalidRequest(f"{field} {text!r}: give {wanted}", param=field) from error
    if not math.isfinite(value):
        raise InvalidRequest(f"{field} {text!r}: give a finite number", param=field)
    return value


def _parse_words(field: str, text: str) -> tuple[str, ...] | tuple[int, ...]:
    # \n is what people stop at, and a line cannot hold one
    words = tuple(word.replace("\\n", "\n") for word in _split_words(field, text))
    if field != "stop_token_ids":
        return words
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise InvalidRequest(f"{field} {text!r}: give whole numbers", param=field) from error


def _split_words(field: str, text: str) -> list[str]:
    """Words at blanks, except within quotes; a backslash is one."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = lexer.escape = ""
    try:
        words = list(lexer)
    except ValueError as error:
        wanted = "close the quote, or put the text in quotes of the other kind"
        raise InvalidRequest(f"{field} {text}: {wanted}", param=field) from error
    if "" in words:
        raise InvalidRequest(f"{field} {text}: a text cannot be empty", param=field)
    return words


def _parse_bool(field: str, text: str) -> bool:
    if text.lower() not in ("on", "off", "true", "false"):
        raise InvalidRequest(f"{field} {text!r}: give on or off", param=field)
    return text.lower() in ("on", "true")


def _field_types() -> dict[str, type]:
    """The plain type of each field: `float` of `float | None`, `tuple` of `tuple[str, ...]`."""
    return {name: _plain_type(hint) for name, hint in get_type_hints(SamplingParams).items()}


def _plain_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        return _plain_type(next(part for part in get_args(hint) if part is not types.NoneType))
    origin: type = getattr(hint, "__origin__", hint)
    return origin


def _is_set(value: object) -> bool:
    return value is not None and value != () and value != {} and value is not False


def _format_value(value: object) -> str:
    match value:
        case None | () | False:
            return "-"
        case dict():
            return " ".join(f"{token}={bias:g}" for token, bias in value.items()) or "-"
        case tuple():
            return " ".join(repr(part) for part in value)
        case float():
            return f"{value:g}"
    return str(value)
