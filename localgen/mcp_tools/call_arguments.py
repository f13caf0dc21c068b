"""A tool call as text for the terminal, and its arguments as values."""

from __future__ import annotations

import json
import re
from typing import Any

from localgen.backends.terminal_text import one_line
from localgen.backends.types import ToolCall

# of each value among the arguments
_SHOWN_START, _SHOWN_END = 400, 200
_BLANKS = re.compile(r"\s{4,}")


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The arguments as values; None if they are not a JSON object that can be sent."""
    try:
        parsed = json.loads(text or "{}", parse_constant=_refuse_constant)
        json.dumps(parsed, ensure_ascii=False).encode()  # half of a surrogate pair cannot be sent
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def call_title(name: str) -> str:
    """SERVER.TOOL of the name that a model calls a tool by, which may be cut."""
    return one_line(name.replace("__", ".", 1))


def call_line(call: ToolCall) -> str:
    """A call in one line, with long arguments cut."""
    return f"▸ {call_title(call.name)} {shown_arguments(call.arguments)}"


def whole_arguments(arguments: str) -> str:
    """The arguments of a call for the terminal, with control characters escaped."""
    parsed = parse_arguments(arguments)
    return one_line(arguments if parsed is None else json.dumps(parsed, ensure_ascii=False))


def shown_arguments(arguments: str) -> str:
    """As whole_arguments(), with the beginning and the end of each value.

    What is left out is named, so that no value is hidden behind another one, or behind blanks.
    """
    parsed = parse_arguments(arguments)
    if parsed is None:
        return one_line(_shortened(arguments))
    try:
        return one_line(json.dumps(_shown_value(parsed), ensure_ascii=False))
    except RecursionError:
        return one_line(_shortened(arguments))


def _shown_value(value: Any) -> Any:
    match value:
        case str():
            return _shortened(value)
        case dict():
            shown: dict[str, Any] = {}
            for name, each in value.items():
                short = _shortened(name)
                while short in shown:  # names may differ in what is left out
                    short += " (another)"
                shown[short] = _shown_value(each)
            return shown
        case list():
            return [_shown_value(each) for each in value]
    return value


def _shortened(text: str) -> str:
    text = _BLANKS.sub(lambda blanks: f" [{len(blanks[0]):,} blanks] ", text)
    left_out = len(text) - _SHOWN_START - _SHOWN_END
    if left_out <= 0:
        return text
    return f"{text[:_SHOWN_START]} [{left_out:,} more characters] {text[-_SHOWN_END:]}"
