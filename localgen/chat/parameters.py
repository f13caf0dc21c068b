"""Sampling parameters by name, for `/set parameter` and `/show parameters`."""

from __future__ import annotations

import difflib
import json
import math
import os
import shlex
import types
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from localgen.backends import sampling_params
from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import (
    ANY_JSON_OBJECT,
    BASE_SAMPLING,
    GRAMMAR_FIELDS,
    PARAMETER_HELP,
    SAMPLERS,
    SamplingParams,
)
from localgen.backends.types import OVERFLOW_ERROR

# a chat cannot show logprobs, and fills nothing in
_NOT_IN_CHATS = ("logprobs", "infill_sampler")
PARAMETER_NAMES = tuple(f.name for f in fields(SamplingParams) if f.name not in _NOT_IN_CHATS)
PARAMETER_ALIASES = {
    "n": "max_tokens",
    "num_predict": "max_tokens",
    "think_max": "thinking_budget",
} | {alias: sampler.name for sampler in SAMPLERS for alias in sampler.aliases}
# those that most users set, and the other samplers; what is in neither is rarely needed
USUAL_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "stop")
MORE_SAMPLERS = tuple(s.name for s in SAMPLERS if s.name not in USUAL_PARAMETERS)
RARE_PARAMETERS = tuple(
    name for name in PARAMETER_NAMES if name not in (*USUAL_PARAMETERS, *MORE_SAMPLERS)
)
_LOWEST = {"max_tokens": 1, "min_tokens": 0, "thinking_budget": 0, "seed": 0}
UNSET_WORDS = ("default", "none", "unset")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a chat or a single prompt: load options, sampling parameters, scheduling.

    save_prefix, on_overflow: see Request. figures: show speed and context below each answer.
    verbose: show all measurements.
    """

    params: SamplingParams = SamplingParams()
    load: LoadOptions = LoadOptions()
    ctx: int | None = None
    system: str | None = None
    priority: int = 0
    keep_alive: str | None = None
    save_prefix: bool = True
    on_overflow: str = OVERFLOW_ERROR
    figures: bool = True
    verbose: bool = False


def with_parameter(
    params: SamplingParams, name: str, text: str, *, validate: bool = False
) -> SamplingParams:
    """Return the parameters with one of them set from text; `default` unsets it.

    validate: check the value against the rules of the local engines, which do not apply to remote
    servers. Raises InvalidRequest if the name or the value is invalid.
    """
    field = resolve_parameter_name(name)
    default = getattr(SamplingParams(), field)
    value: Any = default if text.lower() in UNSET_WORDS else _parse_value(field, text)
    changed = replace(params, **{field: value})
    if validate and value != default:  # unsetting is always valid
        if (lowest := _LOWEST.get(field)) is not None and value < lowest:
            raise InvalidRequest(f"{field} is {value}, it must be at least {lowest}", param=field)
        sampling_params.validate_sampling_params(changed.with_defaults(BASE_SAMPLING))
        sampling_params.reject_mirostat_conflicts(changed)
        if field in GRAMMAR_FIELDS:
            from localgen.backends.text.grammar_check import validate_grammar

            validate_grammar(field, value)
    return changed


def is_parameter_name(name: str) -> bool:
    return _parameter_field(name) in PARAMETER_NAMES


def resolve_parameter_name(name: str) -> str:
    """Return the field of a parameter name such as `top-k` or `temp`.

    Raises InvalidRequest with the closest match if there is none.
    """
    found = _parameter_field(name)
    if found in PARAMETER_NAMES:
        return found
    close = difflib.get_close_matches(found, (*PARAMETER_NAMES, *PARAMETER_ALIASES), n=1)
    hint = f", did you mean {close[0]}?" if close else f": known are {', '.join(PARAMETER_NAMES)}"
    raise InvalidRequest(f"no parameter {name!r}{hint}", param="parameter")


def _parameter_field(name: str) -> str:
    normalized = name.lower().lstrip("-").replace("-", "_")
    return PARAMETER_ALIASES.get(normalized, normalized)


def effective_parameters(
    params: SamplingParams,
    preset_params: SamplingParams,
    model_defaults: SamplingParams,
    fallback_defaults: SamplingParams = BASE_SAMPLING,
) -> list[tuple[str, str, str]]:
    """Name, effective value and source of each parameter.

    The source is `yours` (set by the user), `preset`, `model` (a default of the model) or empty.
    """
    table = []
    for name in PARAMETER_NAMES:
        unset = getattr(SamplingParams(), name)
        sources = (
            *((params, "yours"), (preset_params, "preset")),
            *((model_defaults, "model"), (fallback_defaults, "")),
        )
        owner, origin = next(
            ((source, origin) for source, origin in sources if getattr(source, name) != unset),
            (fallback_defaults, ""),
        )
        table.append((name, _format_value(getattr(owner, name)), origin))
    return table


def describe(name: str) -> str:
    """What a parameter does, and the range of a sampler."""
    sampler = next((each for each in SAMPLERS if each.name == name), None)
    if sampler is None:
        return PARAMETER_HELP[name] + "."
    return f"{sampler.help} {sampler.bounds}".strip() + ("." if sampler.bounds else "")


def parse_logit_bias(pairs: Iterable[str]) -> dict[int, float]:
    """Parse `ID=BIAS` pairs. Raises InvalidRequest if one is invalid."""
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


def parse_format(text: str, name: str) -> str:
    """The JSON schema of an answer's format: `json` for any object, a schema, or @FILE.

    name: of the setting, for errors. Raises InvalidRequest if it is not JSON.
    """
    if text == "json":
        return ANY_JSON_OBJECT
    schema = text
    if text.startswith("@"):
        path = Path(os.path.expanduser(text[1:]))
        schema = read_text_file(path, name, "json_schema").removesuffix("\n")
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        place = ""
        if isinstance(error, json.JSONDecodeError):
            place = f" (line {error.lineno}, column {error.colno})"
        raise InvalidRequest(
            f"{name} {text[:60]} is not JSON{place}: give json, a JSON schema or @FILE",
            param="json_schema",
        ) from error
    return schema


def read_text_file(path: Path, name: str, field: str) -> str:
    """The text of a file. Raises InvalidRequest, whose message begins with `name`.

    field: the parameter or option that the text is for.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InvalidRequest(f"{name} file {path}: {reason}", param=field) from error


def _parse_value(field: str, text: str) -> Any:
    kind = _field_types()[field]
    if field == "json_schema":
        return parse_format(text, field)
    if kind is str:
        return text
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
    # accept \n: a newline is a common stop string and cannot be typed on one line
    words = tuple(word.replace("\\n", "\n") for word in _split_words(field, text))
    if field != "stop_token_ids":
        return words
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise InvalidRequest(f"{field} {text!r}: give whole numbers", param=field) from error


def _split_words(field: str, text: str) -> list[str]:
    """Split at whitespace outside quotes; a backslash is an ordinary character."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = lexer.escape = ""
    try:
        words = list(lexer)
    except ValueError as error:
        wanted = "close the quote, or put the text in quotes of the other kind"
        raise InvalidRequest(f"{field} {text}: {wanted}", param=field) from error
    if "" in words:
        raise InvalidRequest(f"{field} {text}: a string cannot be empty", param=field)
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
