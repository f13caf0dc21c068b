"""Limit the number of elements in a JSON body and their nesting, before it is parsed.

A few megabytes of JSON can hold a million tiny objects; parsing and validating them blocks the
event loop. Counting single bytes takes a few milliseconds.
"""

from __future__ import annotations

import re

MAX_CONTAINERS = 1 << 14
MAX_STRINGS = 1 << 18
MAX_VALUES = 1 << 20
# parsers and encoders call themselves for each level; the deepest JSON schemas have dozens
MAX_DEPTH = 200
_LIMITS_MESSAGE = (
    f"the request has too many elements, at most {MAX_CONTAINERS:,} objects and lists, "
    f"{MAX_STRINGS:,} strings and {MAX_VALUES:,} values: shorten it"
)
_BRACKETS = re.compile(rb"[\[\]{}]")


def json_limit_error(body: bytes) -> str | None:
    """Return an error message if the body has too many elements, else None.

    Invalid JSON may pass: the parser rejects it later.
    """
    if len(body) < MAX_CONTAINERS:
        return None
    if b"\0" in body:
        return "the body is not JSON in UTF-8"
    plain = _without_escapes(body)
    if plain.count(b'"') > 2 * MAX_STRINGS:
        return _LIMITS_MESSAGE
    if _num_containers(plain) <= MAX_CONTAINERS and plain.count(b",") <= MAX_VALUES:
        return None
    outside = _outside_strings(plain)
    many = _num_containers(outside) > MAX_CONTAINERS or outside.count(b",") > MAX_VALUES
    return _LIMITS_MESSAGE if many else None


def json_depth_error(body: bytes) -> str | None:
    """Return an error message if the elements of a body are nested too deeply, else None.

    Call it for a body within the other limits.
    """
    if _num_containers(body) <= MAX_DEPTH:
        return None
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_outside_strings(_without_escapes(body))):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest <= MAX_DEPTH:
        return None
    return (
        f"the JSON of the request is nested too deeply: {deepest:,} levels of objects and lists, "
        f"at most {MAX_DEPTH}"
    )


def _without_escapes(body: bytes) -> bytes:
    # escaped quotes do not end a string
    return body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body


def _outside_strings(plain: bytes) -> bytes:
    return b"".join(plain.split(b'"')[::2])


def _num_containers(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")
