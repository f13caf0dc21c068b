"""Request schema of embeddings, and the inputs that every protocol takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from localgen.backends.errors import InvalidRequest
from localgen.server.requests.body import RequestBody

# per request, as in the OpenAI API
MAX_EMBEDDING_INPUTS = 2048


def validate_embedding_input(value: Any) -> Any:
    """Return the value. Raises InvalidRequest if it is not texts or token ids, or too many."""
    inputs = [value] if _is_single_input(value) else value
    if not isinstance(inputs, list) or not inputs:
        raise InvalidRequest(
            "input must be a string, token ids, or a list of either", param="input"
        )
    if len(inputs) > MAX_EMBEDDING_INPUTS:
        raise InvalidRequest(
            f"input has {len(inputs):,} texts, "
            f"the limit is {MAX_EMBEDDING_INPUTS:,}: send several requests",
            param="input",
        )
    for at, each in enumerate(inputs):
        if not _is_single_input(each):
            place = f"input[{at}]"
            raise InvalidRequest(f"{place} is neither a string nor token ids", param=place)
    return value


def normalize_embedding_input(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Convert a validated input to one item per embedding."""
    inputs = [value] if _is_single_input(value) else value
    return tuple(each if isinstance(each, str) else tuple(each) for each in inputs)


def _is_single_input(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(token) is int and 0 <= token < 2**31 for token in value)
    return isinstance(value, str)


class EmbeddingRequest(RequestBody):
    """POST /v1/embeddings. input: a string, token ids, or a list of either."""

    model: str | None = None
    input: Annotated[
        str | list[str] | list[int] | list[list[int] | str],
        BeforeValidator(validate_embedding_input),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    user: str | None = None
