"""`localgen bench --matrix`: the load options that vary, from text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, get_args

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.bench.matrix import Combination
from localgen.chat.parameters import ModelOptions
from localgen.cli.options import LOAD_OPTIONS, REQUEST_OPTIONS, CliOption, build_model_options

_MAX_COMBINATIONS = 256
_LOAD_FIELDS = frozenset(field.name for field in fields(LoadOptions))
_FLAGS = {
    name.lstrip("-"): flag
    for flag in (*LOAD_OPTIONS, *REQUEST_OPTIONS)
    if flag.field in _LOAD_FIELDS
    for names in flag.names.split()
    for name in names.split("/")[:1]
}


def parse_matrix(texts: Sequence[str], options: ModelOptions) -> list[Combination]:
    """All combinations of `threads=1,2 ctk=f16,q8_0`, on top of the other load options.

    Raises InvalidRequest if an option or a value is invalid.
    """
    varied: dict[str, list[str]] = {}
    for part in " ".join(texts).split():
        name, _, values = part.partition("=")
        if not values or name in varied:
            raise InvalidRequest(f"--matrix {part}: give each option once, such as threads=1,2")
        varied[name] = [value for value in values.split(",") if value]
    chosen = list(product(*varied.values()))
    if not varied or not 0 < len(chosen) <= _MAX_COMBINATIONS:
        raise InvalidRequest(
            f"--matrix: give options such as threads=1,2 (at most {_MAX_COMBINATIONS} combinations)"
        )
    return [_combination(dict(zip(varied, values, strict=True)), options) for values in chosen]


def _combination(varied: dict[str, str], options: ModelOptions) -> Combination:
    given = {_flag(name).field: _value(_flag(name), name, text) for name, text in varied.items()}
    load = build_model_options(given).load
    changed = {field: getattr(load, field) for field in given}
    return Combination(varied, replace(options.load, **changed))


def _flag(name: str) -> CliOption:
    if name not in _FLAGS:
        raise InvalidRequest(f"--matrix {name}: it is no load option (see localgen bench --help)")
    return _FLAGS[name]


def _value(flag: CliOption, name: str, text: str) -> Any:
    """The value of an option as the command line would read it."""
    choices = get_args(flag.value_type)
    try:
        if flag.value_type is bool:
            return {"on": True, "off": False}[text]
        if flag.value_type in (int, float):
            return flag.value_type(text)
        if choices and text not in choices:
            raise ValueError(text)
    except (ValueError, KeyError) as error:
        wanted = ", ".join(choices) or {bool: "on or off", int: "a whole number"}.get(
            flag.value_type, "a number"
        )
        raise InvalidRequest(f"--matrix {name}={text}: give {wanted}") from error
    return text
