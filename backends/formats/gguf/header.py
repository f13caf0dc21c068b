"""The first part of a GGUF file: what describes the model, before its vocabulary.

The gguf package maps a whole file and reads all of it. This reads the first kilobytes, of a file
here or of the beginning of one elsewhere, which is all that its shape needs.
"""

from __future__ import annotations

import struct
from io import SEEK_CUR, BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from localgen.backends.errors import LoadFailed

# of GGUF's value types: how struct unpacks them
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_STRING, _LONGEST_ARRAY = 1 << 20, 1 << 11
_LARGEST_BYTES = 1 << 40
# what is longest by far; converters write a model's shape before it
VOCABULARY = "tokenizer.ggml.tokens"


class _Cut(Exception):
    """The file ends, or what follows is not needed or not understood."""


def read_header(path: Path) -> dict[str, Any]:
    """Metadata by key, as far as the vocabulary if the shape comes before it. Of an array that is
    as long as a vocabulary there is the length only.

    LoadFailed: it is no GGUF file.
    """
    try:
        with path.open("rb") as file:
            return parse_header(file, str(path))
    except OSError as error:
        raise LoadFailed(f"{path} cannot be read: {error.strerror or error}") from None


def parse_header(content: BinaryIO | bytes, name: str) -> dict[str, Any]:
    """As read_header, of a stream or of the first bytes of a file, as far as they go."""
    stream = BytesIO(content) if isinstance(content, bytes) else content
    found: dict[str, Any] = {}
    try:
        magic, version, _, count = struct.unpack("<4sIQQ", _read(stream, 24))
        if magic != b"GGUF" or version not in (2, 3):
            raise LoadFailed(f"{name} is no GGUF file")
        for _ in range(count):
            key = _string(stream)
            kind = _number(stream, "I")
            found[key] = _value(stream, kind)
            if key == VOCABULARY and f"{found.get('general.architecture')}.block_count" in found:
                break
    except _Cut:
        pass
    if "general.architecture" not in found:
        raise LoadFailed(f"{name} is no GGUF file, or damaged or cut short")
    return found


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(stream)
    if kind != _ARRAY:
        return _number(stream, _scalar(kind))
    kind, count = struct.unpack("<IQ", _read(stream, 12))
    if kind != _STRING:
        code = _scalar(kind)
        size = count * struct.calcsize(code)
        if count > _LONGEST_ARRAY:
            return _skipped(stream, size, count)
        return list(struct.unpack(f"<{count}{code}", _read(stream, size)))
    if count <= _LONGEST_ARRAY:
        return [_string(stream) for _ in range(count)]
    for _ in range(count):
        _skipped(stream, _number(stream, "Q"), 1)
    return count


def _skipped(stream: BinaryIO, size: int, count: int) -> int:
    """Go on behind so many bytes, of which nothing is needed but their number of elements."""
    if size > _LARGEST_BYTES:
        raise _Cut
    stream.seek(size, SEEK_CUR)
    return count


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise _Cut
    return _SCALARS[kind]


def _number(stream: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", _read(stream, struct.calcsize(f"<{code}")))[0]


def _string(stream: BinaryIO) -> str:
    size = _number(stream, "Q")
    if size > _LONGEST_STRING:
        raise _Cut
    return _read(stream, size).decode("utf-8", "replace")


def _read(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise _Cut
    return found
