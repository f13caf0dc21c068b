"""Decode JSON from a server."""

from __future__ import annotations

from typing import Any

import msgspec


def decode_json(body: bytes, kind: Any = Any) -> Any:
    """Decode JSON, as a type of msgspec.

    Raises msgspec.DecodeError if it is not of that type, not UTF-8, or nested too deeply.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None
