"""Decode JSON and convert plain data into known types, from any thread, by msgspec."""

from __future__ import annotations

import functools
import threading
from typing import Any, TypeVar, overload

import msgspec

_T = TypeVar("_T")

# msgspec describes a type at its first use, in Python code that another thread may interrupt; if
# that one uses the type too, it reads what is half built, and the process dies of SIGSEGV
_lock = threading.Lock()


def prepare_type(kind: Any) -> None:
    """Let msgspec describe a type, and all in it. Threads may use it afterwards."""
    with _lock:
        _decoder(kind)


@overload
def decode_json(body: bytes | str) -> Any: ...
@overload
def decode_json(body: bytes | str, kind: type[_T]) -> _T: ...
def decode_json(body: bytes | str, kind: Any = Any) -> Any:
    """Decode JSON, as a type.

    Raises msgspec.DecodeError if it is not of that type, not UTF-8, or nested too deeply.
    """
    with _lock:
        decoder = _decoder(kind)
    try:
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None


def convert(value: object, kind: type[_T]) -> _T:
    """Convert dicts, lists and scalars into a type. Raises msgspec.ValidationError."""
    prepare_type(kind)
    return msgspec.convert(value, kind)


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Only with the lock."""
    return msgspec.json.Decoder(kind)
