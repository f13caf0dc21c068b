"""Request bodies: unknown and unsupported fields are rejected by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import Sampler

# as wide as the engine's own numbers
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


def reject_unsupported_fields(body: Any, unsupported: dict[str, tuple[object, ...]]) -> Any:
    """Return the body without fields that only other servers support.

    unsupported: field name -> values without effect. Raises InvalidRequest for a field with any
    other value except null.
    """
    # thousands of messages have none of them, and each is checked while all other clients wait
    if not isinstance(body, dict) or unsupported.keys().isdisjoint(body):
        return body
    for name, harmless in unsupported.items():
        value = body.get(name)
        if value is not None and not any(_strictly_equal(value, known) for known in harmless):
            raise InvalidRequest(f"{name} is not supported: leave it out", param=name)
    return {name: value for name, value in body.items() if name not in unsupported}


def drop_fields(body: Any, harmless: tuple[str, ...]) -> Any:
    """Return the body without fields that are accepted but have no effect."""
    if not isinstance(body, dict) or body.keys().isdisjoint(harmless):
        return body
    return {name: value for name, value in body.items() if name not in harmless}


def drop_nulls(body: Any) -> Any:
    """Return the body without null fields: clients send back all that an answer may have had."""
    if not isinstance(body, dict):
        return body
    return {name: value for name, value in body.items() if value is not None}


def _strictly_equal(value: object, known: object) -> bool:
    # True == 1 in Python
    return value == known and isinstance(value, bool) == isinstance(known, bool)


def _find_lone_surrogate(body: Any) -> str | None:
    """Return the path of a string with a lone surrogate, such as JSON's \\ud800, or None."""
    with contextlib.suppress(UnicodeEncodeError, RecursionError, TypeError):
        json.dumps(body, ensure_ascii=False).encode()  # far faster than the search below
        return None
    waiting = [("", body)]  # no recursion: a body may be nested deeper than Python's stack allows
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, str):
            if not _is_unicode(value):
                return place
        elif isinstance(value, list):
            waiting += [
                (f"{place}[{at}]", part)
                for at, part in enumerate(value)
                if isinstance(part, (str, list, dict))
            ]
        elif isinstance(value, dict):
            for name, part in value.items():
                inner = f"{place}.{name}".removeprefix(".")
                if not _is_unicode(name):
                    return inner.encode(errors="replace").decode()
                waiting.append((inner, part))
    return None


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


class StrictModel(BaseModel):
    """A model that rejects unknown fields, other JSON types ("5" for 5), NaN and infinities."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class RequestBody(StrictModel):
    """Base of request bodies. Rejects strings that are not valid Unicode."""

    @model_validator(mode="before")
    @classmethod
    def _require_unicode(cls, body: Any) -> Any:
        place = _find_lone_surrogate(body)
        if place is not None:
            raise InvalidRequest(f"{place}: invalid Unicode, lone surrogate", param=place)
        return body


def with_sampler_fields(base: type[BaseModel], samplers: Iterable[Sampler]) -> type[BaseModel]:
    """The model with an optional field for each sampler. The engine checks their ranges."""
    types: dict[object, Any] = {int: Int32, float: float}
    optional: dict[str, Any] = {
        sampler.name: (types.get(sampler.value_type, list[str]) | None, None)
        for sampler in samplers
    }
    return create_model(base.__name__, __base__=base, **optional)
