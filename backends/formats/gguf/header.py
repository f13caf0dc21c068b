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
_MAX_STRING_BYTES, _MAX_ARRAY_LENGTH = 1 << 20, 1 << 11
_MAX_SKIP_BYTES = 1 << 40
# what is longest by far; converters write a model's shape before it
TOKENS_KEY = "tokenizer.ggml.tokens"


class _EndOfData(Exception):
    """The file ends, or what follows is not needed or not understood."""


def read_gguf_header(path: Path) -> dict[str, Any]:
    """Metadata by key, as far as the vocabulary if the shape comes before it. Of an array that is
    as long as a vocabulary there is the length only.

    LoadFailed: it is no GGUF file.
    """
    try:
        with path.open("rb") as file:
            return parse_gguf_header(file, str(path))
    except OSError as error:
        raise LoadFailed(f"{path} cannot be read: {error.strerror or error}") from None


def parse_gguf_header(content: BinaryIO | bytes, name: str) -> dict[str, Any]:
    """As read_gguf_header, of a stream or of the first bytes of a file, as far as they go."""
    stream = BytesIO(content) if isinstance(content, bytes) else content
    found: dict[str, Any] = {}
    try:
        magic, version, _, count = struct.unpack("<4sIQQ", _read_exactly(stream, 24))
        if magic != b"GGUF" or version not in (2, 3):
            raise LoadFailed(f"{name} is no GGUF file")
        for _ in range(count):
            key = _read_string(stream)
            kind = _read_scalar(stream, "I")
            found[key] = _read_value(stream, kind)
            if key == TOKENS_KEY and f"{found.get('general.architecture')}.block_count" in found:
                break
    except _EndOfData:
        pass
    if "general.architecture" not in found:
        raise LoadFailed(f"{name} is no GGUF file, or damaged or cut short")
    return found


def _read_value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _read_string(stream)
    if kind != _ARRAY:
        return _read_scalar(stream, _scalar_format(kind))
    kind, count = struct.unpack("<IQ", _read_exactly(stream, 12))
    if kind != _STRING:
        code = _scalar_format(kind)
        size = count * struct.calcsize(code)
        if count > _MAX_ARRAY_LENGTH:
            return _skip(stream, size, count)
        return list(struct.unpack(f"<{count}{code}", _read_exactly(stream, size)))
    if count <= _MAX_ARRAY_LENGTH:
        return [_read_string(stream) for _ in range(count)]
    for _ in range(count):
        _skip(stream, _read_scalar(stream, "Q"), 1)
    return count


def _skip(stream: BinaryIO, size: int, count: int) -> int:
    """Go on behind so many bytes, of which nothing is needed but their number of elements."""
    if size > _MAX_SKIP_BYTES:
        raise _EndOfData
    stream.seek(size, SEEK_CUR)
    return count


def _scalar_format(kind: int) -> str:
    if kind not in _SCALARS:
        raise _EndOfData
    return _SCALARS[kind]


def _read_scalar(stream: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", _read_exactly(stream, struct.calcsize(f"<{code}")))[0]


def _read_string(stream: BinaryIO) -> str:
    size = _read_scalar(stream, "Q")
    if size > _MAX_STRING_BYTES:
        raise _EndOfData
    return _read_exactly(stream, size).decode("utf-8", "replace")


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise _EndOfData
    return found
