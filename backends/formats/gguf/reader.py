"""GGUF files: metadata and tensor table, of a local file or of the first bytes of a remote one.

The gguf package maps a whole file and makes an array of every metadata element, which takes seconds
for today's vocabularies. Here values are decoded on demand, from any prefix of a file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localgen.backends.errors import LoadFailed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# GGUF's value types as formats of struct
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9
_DEFAULT_ALIGNMENT = 32
# longer arrays are of the vocabulary: the header has their length only
_MAX_HEADER_ARRAY = 2048
# far more than any model has; each costs time and memory before it is known to be useless
_MAX_KEYS = _MAX_TENSORS = 65_536
# GGML_MAX_DIMS
_MAX_DIMS = 4
# the longest array by far; converters write the shape of the model before it
TOKENS_KEY = "tokenizer.ggml.tokens"

_read_length = struct.Struct("<Q").unpack_from


def read_gguf_header(path: Path, *, whole: bool = False) -> dict[str, Any]:
    """Return the metadata by key, up to the vocabulary if the model's shape comes before it.

    whole: read what follows the vocabulary, too. Arrays as long as a vocabulary are given as their
    length. Raises LoadFailed if the file cannot be read or is not GGUF.
    """
    return parse_gguf_header(_map_file(path), str(path), whole=whole)


def parse_gguf_header(
    content: bytes | memoryview, name: str, *, whole: bool = False
) -> dict[str, Any]:
    """Like read_gguf_header, for a truncated prefix of a file."""
    found: dict[str, Any] = {}
    reason = "it has no general.architecture"
    try:
        for key, value in _Parser(content).metadata():
            found[key] = value.summary()
            if whole:
                continue
            if key == TOKENS_KEY and f"{found.get('general.architecture')}.block_count" in found:
                break
    except ValueError as error:
        reason = str(error)
    if "general.architecture" not in found:
        raise LoadFailed(f"{name} is not a valid GGUF file: {reason}")
    return found


def check_gguf_start(content: bytes | memoryview, name: str) -> None:
    """Raise LoadFailed unless these first bytes of a file, at least 24, are those of GGUF."""
    try:
        _Parser(content).counts()
    except ValueError as error:
        raise LoadFailed(f"{name} is not a valid GGUF file: {error}") from None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the tensor table.

    shape: rows first. type_name: for example F16 or Q4_K. data: [..., bytes of a row], mapped, from
    byte `offset` of the file on.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    data: NDArray[np.uint8]
    offset: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class GgufReader:
    """A mapped GGUF file: metadata and tensors.

    Raises LoadFailed if the file cannot be read, is not GGUF, is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, _Value] = {}
        raw = _map_file(path)
        parser = _Parser(raw)
        try:
            for key, value in parser.metadata():
                if key in self._values:
                    raise ValueError(f"duplicate key {key}")
                self._values[key] = value
            entries = list(parser.tensor_table())
            self.data_offset = parser.position + -parser.position % self._alignment()
            self.tensors = [self._tensor(raw, *entry) for entry in entries]
        except (ValueError, OverflowError) as error:
            raise LoadFailed(f"{path} is not a valid GGUF file: {error}") from None
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise LoadFailed(f"{path} is not a valid GGUF file: duplicate tensor names")

    def __iter__(self) -> Iterator[str]:
        """Keys of the metadata, in the order of the file."""
        return iter(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str) -> Any:
        """A metadata value: a bool, number, string, or a list of one kind of them.

        Raises LoadFailed if a string is not UTF-8.
        """
        try:
            return self._values[key].decode()
        except UnicodeDecodeError:
            raise LoadFailed(f"{self._path}: {key} is not UTF-8") from None

    def get(self, key: str, /) -> Any:
        """As value(); None if there is no such key."""
        return self.value(key) if key in self._values else None

    def is_float32(self, key: str) -> bool:
        """True if the value is one 32-bit float: llama.cpp aborts if it expects one."""
        value = self._values.get(key)
        return value is not None and not value.is_array and value.kind == _FLOAT32

    def _alignment(self) -> int:
        key = "general.alignment"
        if key not in self._values:
            return _DEFAULT_ALIGNMENT
        value = self._values[key]
        alignment = value.decode()
        if value.is_array or value.kind != _UINT32 or not alignment or alignment & (alignment - 1):
            raise ValueError(f"{key} is not a power of two")
        return int(alignment)

    def _tensor(
        self, raw: memoryview, name: str, dims: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        import gguf  # not needed for metadata, nor is numpy
        import numpy as np

        try:
            ggml_type = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise LoadFailed(f"{self._path}: {name} is of unknown type {kind}") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        if 0 in dims:
            raise ValueError(f"{name} has no elements")
        if dims[0] % block:
            raise ValueError(f"{name} has rows of {dims[0]} values, {ggml_type.name} packs {block}")
        shape = (*dims[:0:-1], dims[0] // block * block_bytes)
        if math.prod(max(1, size) for size in shape) >= 1 << 63:
            raise ValueError(f"{name} has dimensions beyond 64 bits: {list(dims[::-1])}")
        start = self.data_offset + offset
        end = start + math.prod(shape)
        if end > len(raw):
            raise LoadFailed(
                f"{self._path} is cut short: {name} ends at byte {end:,}, "
                f"the file has {len(raw):,}: download it again"
            )
        content = np.frombuffer(raw[start:end], np.uint8).reshape(shape)
        return GgufTensor(name, dims[::-1], ggml_type.name, content, start)


@dataclass(frozen=True, slots=True)
class _Value:
    """An undecoded metadata value in raw[start:end]. kind: of the value, or of an array's items."""

    raw: memoryview
    kind: int
    is_array: bool
    count: int
    start: int
    end: int

    def decode(self, errors: str = "strict") -> Any:
        if self.kind == _STRING:
            strings = self._strings(errors)
            return strings if self.is_array else strings[0]
        numbers = struct.unpack_from(f"<{self.count}{_SCALARS[self.kind]}", self.raw, self.start)
        return list(numbers) if self.is_array else numbers[0]

    def summary(self) -> Any:
        """The value, or the length of a long array."""
        return self.count if self.count > _MAX_HEADER_ARRAY else self.decode("replace")

    def _strings(self, errors: str) -> list[str]:
        raw, at, found = self.raw[self.start : self.end].tobytes(), 0, []
        for _ in range(self.count):
            first = at + 8
            at = first + _read_length(raw, at)[0]
            found.append(raw[first:at].decode("utf-8", errors))
        return found


class _Parser:
    """Reads the bytes of a GGUF file in order. Raises ValueError where they end or are invalid."""

    def __init__(self, content: bytes | memoryview) -> None:
        self._raw = memoryview(content)
        self._num_tensors = 0
        self.position = 0

    def metadata(self) -> Iterator[tuple[str, _Value]]:
        """Every key with its value, from the beginning of the file."""
        self._num_tensors, num_keys = self.counts()
        for _ in range(num_keys):
            key = self._name()
            yield key, self._value()

    def counts(self) -> tuple[int, int]:
        """Number of tensors and of keys, from the beginning of the file."""
        if self._raw[:4].tobytes() != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.position = 4
        (version,) = self._read("I")
        if not version & 0xFFFF:
            raise ValueError("it is big-endian")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported")
        num_tensors, num_keys = self._read("2Q")
        if num_keys > _MAX_KEYS:
            raise ValueError(f"it has {num_keys:,} metadata keys, at most {_MAX_KEYS:,} are read")
        if num_tensors > _MAX_TENSORS:
            raise ValueError(f"it has {num_tensors:,} tensors, at most {_MAX_TENSORS:,} are read")
        return num_tensors, num_keys

    def tensor_table(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Name, dimensions (rows last), type and offset of every tensor, after the metadata."""
        for _ in range(self._num_tensors):
            name = self._name()
            (num_dims,) = self._read("I")
            if not 0 < num_dims <= _MAX_DIMS:
                raise ValueError(f"{name} has {num_dims:,} dimensions, not 1 to {_MAX_DIMS}")
            dims = self._read(f"{num_dims}Q")
            kind, offset = self._read("IQ")
            yield name, dims, kind, offset

    def _value(self) -> _Value:
        (kind,) = self._read("I")
        is_array, count = kind == _ARRAY, 1
        if is_array:
            kind, count = self._read("IQ")
        start = self.position
        if kind == _STRING:
            self._skip_strings(count)
        elif kind in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[kind]))
        else:
            raise ValueError(f"unknown value type {kind}")
        return _Value(self._raw, kind, is_array, count, start, self.position)

    def _name(self) -> str:
        start = self.position + 8
        self._skip_strings(1)
        try:
            name = str(self._raw[start : self.position], "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"the name at byte {start:,} is not UTF-8") from None
        if not name.isprintable():  # messages show names
            raise ValueError(f"invalid name {name!r}")
        return name

    def _read(self, fields: str) -> tuple[Any, ...]:
        start = self.position
        self._skip(struct.calcsize(f"<{fields}"))
        return struct.unpack_from(f"<{fields}", self._raw, start)

    def _skip_strings(self, count: int) -> None:
        raw, at = self._raw, self.position
        try:
            for _ in range(count):
                at += 8 + _read_length(raw, at)[0]
        except (struct.error, OverflowError, IndexError):  # the next length is beyond the end
            at = self.position + len(raw) + 1
        self._skip(at - self.position)

    def _skip(self, size: int) -> None:
        if size > len(self._raw) - self.position:
            raise ValueError(f"it ends after {len(self._raw):,} bytes")
        self.position += size


def _map_file(path: Path) -> memoryview:
    try:
        with open(path, "rb") as file:
            if not path.stat().st_size:
                return memoryview(b"")  # which cannot be mapped
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise LoadFailed(f"{path} cannot be read: {error.strerror or error}") from None
