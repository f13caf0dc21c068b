"""Parse the arguments of tool calls: JSON, or `<parameter=name>` tags (Qwen3-Coder, Qwen3.5+)."""

from __future__ import annotations

import json
from typing import Any, Protocol

from localgen.backends.text.pattern import SPACE, PartialPattern

_OPEN = "<parameter="
_CLOSE = "</parameter>"
_FUNCTION_END = PartialPattern((SPACE, "</function>"))
_PARAMETER_START = PartialPattern((SPACE, _OPEN))
# schema keywords allowed for a string that is written without quotes
_UNQUOTED_KEYS = frozenset({"type", "enum", "description", "title", "default", "examples"})


class ArgumentsParser(Protocol):
    """Parses the arguments of one call. is_done: the last text fed went beyond their end."""

    is_done: bool

    def feed(self, text: str) -> tuple[str, str]:
        """Return the next piece of JSON, and the text that is not part of it or still undecided.

        The caller must feed the remaining text again, followed by new text.
        """
        ...

    def finish(self, remaining: str) -> str:
        """Return the last piece if the response ends here. remaining: text `feed` left over."""
        ...


class JsonArgumentsParser:
    """Passes a JSON object through unchanged, up to its closing brace."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> tuple[str, str]:
        for at, char in enumerate(text):
            if self._in_string:
                self._scan_string(char)
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_done = True
                    return text[: at + 1], text[at + 1 :]
            elif char == '"':
                self._in_string = True
        return text, ""

    def finish(self, remaining: str) -> str:
        return remaining

    def _scan_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


def is_unquoted_string(schema: Any) -> bool:
    """Return True if values of this schema are written as plain text instead of JSON."""
    return (
        isinstance(schema, dict)
        and schema.get("type") == "string"
        and schema.keys() <= _UNQUOTED_KEYS
        and all(isinstance(value, str) for value in schema.get("enum", ()))
    )


class XmlArgumentsParser:
    """Converts parameter tags to a JSON object. properties: schema of each parameter by name."""

    def __init__(self, properties: dict[str, Any]) -> None:
        self.is_done = False
        self._properties = properties
        self._num_parameters = 0
        self._is_unquoted: bool | None = None  # of the current value; None: between parameters
        self._has_output = False  # part of the current value was emitted

    def feed(self, text: str) -> tuple[str, str]:
        pieces = []
        while not self.is_done:
            piece, rest = (
                self._between_parameters(text)
                if self._is_unquoted is None
                else self._in_value(text)
            )
            pieces.append(piece)
            if rest == text:
                break
            text = rest
        return "".join(pieces), text

    def finish(self, remaining: str) -> str:
        """Return the rest of a JSON value; incomplete tags are dropped."""
        return remaining if self._is_unquoted is False else ""

    def _between_parameters(self, text: str) -> tuple[str, str]:
        """Parse the start of a parameter, or the end of the function."""
        found = _PARAMETER_START.match(text)
        if found:
            name, closed, rest = text[found.end() :].partition(">")
            if not closed or not rest:
                return (
                    "",
                    text,
                )  # wait for the next character: a line break is not part of the value
            self._is_unquoted = is_unquoted_string(self._properties.get(name, {"type": "string"}))
            self._has_output = False
            comma = ", " if self._num_parameters else "{"
            self._num_parameters += 1
            return f"{comma}{json.dumps(name, ensure_ascii=False)}: ", rest.removeprefix("\n")
        if _FUNCTION_END.match(text) or not (
            _PARAMETER_START.may_match(text) or _FUNCTION_END.may_match(text)
        ):
            self.is_done = True
            return "}" if self._num_parameters else "{}", text
        return "", text

    def _in_value(self, text: str) -> tuple[str, str]:
        value, closed, rest = text.partition(_CLOSE)
        if closed:
            value = value.removesuffix("\n")
        elif self._is_unquoted:
            value = text[: len(text) - _partial_close_len(text)]
            rest = text[len(value) :]
        else:
            return "", text
        piece = (
            self._json_string_piece(value, closed=bool(closed))
            if self._is_unquoted
            else _to_json(value)
        )
        if closed:
            self._is_unquoted = None
        return piece, rest

    def _json_string_piece(self, value: str, *, closed: bool) -> str:
        """Return the next piece of a JSON string, with its opening or closing quote."""
        opening = "" if self._has_output or not (value or closed) else '"'
        self._has_output = self._has_output or bool(opening)
        closing = '"' if closed else ""
        return opening + json.dumps(value, ensure_ascii=False)[1:-1] + closing


def _partial_close_len(text: str) -> int:
    """Length of the longest suffix of the text that is a prefix of a closing tag."""
    tag = "\n" + _CLOSE
    for length in range(min(len(tag), len(text)), 0, -1):
        end = text[-length:]
        if tag.startswith(end) or _CLOSE.startswith(end):
            return length
    return 0


def _to_json(text: str) -> str:
    """Return the value unchanged if it is JSON, else as a JSON string."""
    try:
        json.loads(text, parse_constant=_reject_constant)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity, which Python accepts but JSON does not
