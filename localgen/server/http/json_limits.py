"""Limit the number of elements in a JSON body before it is parsed.

A few megabytes of JSON can hold a million tiny objects; parsing and validating them blocks the
event loop. Counting single bytes takes a few milliseconds.
"""

from __future__ import annotations

MAX_CONTAINERS = 1 << 14
MAX_STRINGS = 1 << 18
MAX_VALUES = 1 << 20
_LIMITS_MESSAGE = (
    f"the request has too many elements, at most {MAX_CONTAINERS:,} objects and lists, "
    f"{MAX_STRINGS:,} strings and {MAX_VALUES:,} values: shorten it"
)


def json_limit_error(body: bytes) -> str | None:
    """Return an error message if the body has too many elements, else None.

    Invalid JSON may pass: the parser rejects it later.
    """
    if len(body) < MAX_CONTAINERS:
        return None
    if b"\0" in body:
        return "the body is not JSON in UTF-8"
    # escaped quotes do not end a string
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    if plain.count(b'"') > 2 * MAX_STRINGS:
        return _LIMITS_MESSAGE
    if _num_containers(plain) <= MAX_CONTAINERS and plain.count(b",") <= MAX_VALUES:
        return None
    outside = b"".join(plain.split(b'"')[::2])
    many = _num_containers(outside) > MAX_CONTAINERS or outside.count(b",") > MAX_VALUES
    return _LIMITS_MESSAGE if many else None


def _num_containers(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")
