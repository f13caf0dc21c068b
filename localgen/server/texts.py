"""What a request for vectors gives: texts, or the ids of their tokens."""

from __future__ import annotations

from typing import Any

from localgen.backends.errors import InvalidRequest

# in one request, as OpenAI has it
MAX_TEXTS = 2048


def checked(given: Any) -> Any:
    """The same. InvalidRequest: neither texts nor token ids, or too many."""
    inputs = [given] if _is_one(given) else given
    if not isinstance(inputs, list) or not inputs:
        raise InvalidRequest("input must be a text, token ids, or a list of these", param="input")
    if len(inputs) > MAX_TEXTS:
        raise InvalidRequest(
            f"input has {len(inputs):,} texts, at most {MAX_TEXTS:,} fit a request: send several",
            param="input",
        )
    for at, each in enumerate(inputs):
        if not _is_one(each):
            place = f"input[{at}]"
            raise InvalidRequest(f"{place} is neither a text nor token ids", param=place)
    return given


def texts_of(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """One for each vector, of a checked input."""
    inputs = [given] if _is_one(given) else given
    return tuple(each if isinstance(each, str) else tuple(each) for each in inputs)


def _is_one(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(token) is int and 0 <= token < 2**31 for token in value)
    return isinstance(value, str)
