"""Errors about options and variables, which are named as the user gave them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from localgen.backends.errors import LocalgenError
from localgen.cli.commands import CLOSE

if TYPE_CHECKING:
    from localgen.cli.options import CliOption

_PREFIX = "LOCALGEN_"
# the variables that are not options of chat and run
_OTHER_VARIABLES = (
    "STABILIZE",
    *("API_KEY", "API_KEY_ENV", "CONFIG_DIR", "HANG_TIMEOUT", "HISTORY", "HOST", "KEEP_ALIVE"),
    *("MAX_QUEUE", "MEMORY_LIMIT", "MODEL", "PORT", "RUNTIME_DIR", "STATE_DIR", "URL"),
)
# similarity from 0 to 1; other programs and scripts may have variables of their own
_MISSPELT = 0.8
# of llama.cpp's tools and others
_IMAGE_OPTIONS = ("--image", "--images", "--mmproj", "--audio")
_NOT_PARSED = {
    "float_parsing": "a number",
    "int_parsing": "a whole number",
    "bool_parsing": "true or false",
}
# how Typer writes these; Python, and all else here, has names for them
_TYPER_ESCAPES = {r"\x09": r"\t", r"\x0a": r"\n", r"\x0d": r"\r"}


def misspelt_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each LOCALGEN_* variable that is unknown but close to a known one."""
    given = [name.removeprefix(_PREFIX) for name in environ if name.startswith(_PREFIX)]
    if not given:
        return []
    known = known_variables()
    close = {
        name: difflib.get_close_matches(name, known, 1, _MISSPELT)
        for name in sorted(given)
        if name not in known
    }
    return [
        f"{_PREFIX}{name} is not known, did you mean {_PREFIX}{match[0]}?"
        for name, match in close.items()
        if match
    ]


def known_variables() -> set[str]:
    """The names of all LOCALGEN_* variables, without that prefix."""
    from localgen.hub.hf_client import HF_VARIABLES

    options = {option.env_var.removeprefix(_PREFIX) for option in _shared_options()}
    return options | {*_OTHER_VARIABLES, *HF_VARIABLES}


def usage_message(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """The message of an invalid command line, and the command whose help explains it."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if getattr(error, "possibilities", None):
        _keep_close(error)
    message = error.format_message()
    for typed, written in _TYPER_ESCAPES.items():
        message = message.replace(typed, written)
    # the reason as pydantic puts it
    problems = getattr(error.__cause__, "errors", None)
    if param is not None and problems is not None:
        name = _given_name(param.opts, param.envvar, arguments)
        message = f"{name}: {_reason(problems()[0])}"
    if getattr(error, "option_name", "") in _IMAGE_OPTIONS:
        message += "; localgen reads text only, no images"
    elif hasattr(error, "option_name") and context and context.info_name == "launch":
        message += "; arguments of the agent come after --"
    return f"{message} (see {context.command_path if context else 'localgen'} --help)"


def _keep_close(error: Any) -> None:
    """Leave only close matches to an unknown option; Typer compares the dashes too."""
    word = error.option_name.lstrip("-")
    names = {name.lstrip("-"): name for name in error.possibilities}
    close = difflib.get_close_matches(word, names, n=3, cutoff=CLOSE)
    error.possibilities = [names[name] for name in close]


def error_message(error: LocalgenError, arguments: Sequence[str]) -> str:
    """The message of an error; what a variable gave is named by the variable."""
    message, param = error.message, error.param or ""
    for option in _shared_options():
        # of an option that may be repeated, the server names the position: stop[0]
        if option.field == param.partition("[")[0]:
            name = _given_name(option.names.split("/")[0].split(), option.env_var, arguments)
            for prefix in (param, option.long_name):
                if message.startswith((f"{prefix} ", f"{prefix}:", f"{prefix}=")):
                    return name + message.removeprefix(prefix)
    for variable in ("LOCALGEN_MODEL", "LOCALGEN_URL"):
        value = os.environ.get(variable)
        if value and repr(value) in message and value not in " ".join(arguments):
            return f"{variable}={value}: {message}"
    return message


def _shared_options() -> list[CliOption]:
    from localgen.cli.options import OPTION_PANELS

    return [option for options in OPTION_PANELS.values() for option in options]


def _given_name(names: Sequence[str], variable: str | None, arguments: Sequence[str]) -> str:
    """The variable if the option was set by it, else the long name that was typed, or its own."""
    typed = [name for argument in arguments if (name := argument.partition("=")[0]) in names]
    if variable is not None and variable in os.environ and not typed:
        return variable
    long = [name for name in typed if name.startswith("--")]
    return long[-1] if long else max(names, key=len)


def _reason(problem: Any) -> str:
    """A problem of pydantic in few words."""
    value, bounds = problem["input"], problem.get("ctx", {})
    match problem["type"]:
        case "greater_than_equal":
            return f"{value} is below {bounds['ge']}"
        case "less_than_equal":
            return f"{value} is above {bounds['le']}"
        case "value_error":
            return str(bounds["error"]).rstrip(".")
        case kind if kind in _NOT_PARSED:
            return f"{value!r} is not {_NOT_PARSED[kind]}"
    return str(problem["msg"])
