"""The lines of a batch file. All are validated before the first one is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localgen.backends.errors import InvalidRequest

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT_URL, COMPLETIONS_URL)
_FIELDS = ("custom_id", "method", "url", "body")

# raises InvalidRequest for the body of a request to this URL
BodyValidator = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request. number: of the line, from 1. begin, size: its bytes in the file."""

    number: int
    custom_id: str
    url: str
    model: str | None
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a line cannot be a request."""

    number: int
    reason: str


def read_first_line(path: Path) -> BatchLine | None:
    """The first request, unchecked but for its form; None if it has another.

    Raises InvalidRequest if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = next(((n, text) for n, text in enumerate(file, 1) if text.strip()), None)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        return None if found is None else _parse(found[1], found[0], 0, lambda url, body: None)
    except InvalidRequest:
        return None


def read_batch(
    path: Path,
    validate_body: BodyValidator,
    on_line: Callable[[BatchLine], None] = lambda line: None,
) -> tuple[list[BatchLine], list[LineProblem]]:
    """Read and validate a file, without keeping the bodies. Blank lines are skipped.

    on_line: called for each valid line; what it raises ends the reading. Raises InvalidRequest if
    the file cannot be read.
    """
    lines: list[BatchLine] = []
    problems: list[LineProblem] = []
    number_of: dict[str, int] = {}
    begin = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                begin, start = begin + len(text), begin
                if not text.strip():
                    continue
                try:
                    line = _parse(text, number, start, validate_body)
                    first = number_of.setdefault(line.custom_id, number)
                    if first != number:
                        raise InvalidRequest(
                            f"custom_id {line.custom_id!r} is also that of line {first}"
                        )
                except InvalidRequest as error:
                    problems.append(LineProblem(number, error.message))
                else:
                    lines.append(line)
                    on_line(line)
    except OSError as error:
        raise _unreadable(path, error) from error
    return lines, problems


def _unreadable(path: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"--batch {path}: {error.strerror}")


def read_body(path: Path, line: BatchLine) -> dict[str, Any]:
    """The body of a request. Raises InvalidRequest if the file has changed since read_batch()."""
    with path.open("rb") as file:
        file.seek(line.begin)
        try:
            parsed = _json_object(file.read(line.size))
        except InvalidRequest:
            parsed = {}
    if parsed.get("custom_id") != line.custom_id:
        raise InvalidRequest(f"{path} has changed since it was validated: start again")
    body: dict[str, Any] = parsed["body"]
    return body


def _parse(text: bytes, number: int, begin: int, validate_body: BodyValidator) -> BatchLine:
    parsed = _json_object(text)
    if unknown := next((name for name in parsed if name not in _FIELDS), None):
        raise InvalidRequest(f"unknown field {unknown}: fields are {', '.join(_FIELDS)}")
    if missing := next((name for name in _FIELDS if name not in parsed), None):
        raise InvalidRequest(f"{missing} is missing")
    custom_id, url, body = parsed["custom_id"], parsed["url"], parsed["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest("custom_id must be a string that is not empty")
    if parsed["method"] != "POST":
        raise InvalidRequest(f"method is {parsed['method']!r}, it must be POST")
    if url not in URLS:
        raise InvalidRequest(f"url is {url!r}, it must be {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object")
    if body.get("stream"):
        raise InvalidRequest("body.stream must not be true: a batch writes whole answers")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("body.model must be a string")
    validate_body(url, body)
    return BatchLine(number, custom_id, url, model, begin, len(text))


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
        json.dumps(parsed, ensure_ascii=False).encode()  # "\ud800" alone is no text
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8 text"
        raise InvalidRequest(f"not valid JSON: {reason}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("not a JSON object")
    return parsed
