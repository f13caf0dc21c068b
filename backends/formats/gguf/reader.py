"""The gguf package's reader, made quick at vocabularies and exact about damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, ReaderField
from numpy.typing import NDArray

from localgen.backends.errors import LoadFailed

# what a damaged header makes numpy, struct and the reader itself raise
_PARSE_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error)


class GgufReader(gguf.GGUFReader):
    """A mapped file. LoadFailed: it is no GGUF file, damaged, or cut short.

    An array of the metadata is one part, its bytes: the package makes some parts of every
    element, which takes seconds and half a gigabyte for a vocabulary of today.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with np.errstate(over="ignore"):  # offsets of a damaged file; what follows fails
                super().__init__(path)
        except OSError as error:
            raise LoadFailed(f"{path} cannot be read: {error.strerror or error}") from None
        except _PARSE_ERRORS as error:
            reason = " ".join(str(error).split())
            raise LoadFailed(f"{path} is no GGUF file, or damaged or cut short: {reason}") from None

    def value(self, key: str) -> Any:
        """A value of the metadata: a bool, number, string, or list of one kind of them.

        LoadFailed: a string is not UTF-8.
        """
        field = self.fields[key]
        try:
            if field.types[0] is GGUFValueType.STRING:
                return field.parts[-1].tobytes().decode()
            if field.types[0] is not GGUFValueType.ARRAY:
                return field.parts[-1].tolist()[0]
            if field.types[-1] is GGUFValueType.STRING:
                raw = field.parts[-1].tobytes()
                return [raw[start:end].decode() for start, end in _string_spans(raw)]
        except UnicodeDecodeError as error:
            raise LoadFailed(f"{self._path}: {key} is not UTF-8: {error}") from None
        return field.parts[-1].tolist()

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[GGUFValueType]]:
        if self.byte_order == "S":
            raise ValueError("it was written for machines of the other byte order")
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw = self.data.data
        kind, count = struct.unpack_from("<IQ", raw, orig_offs)
        item, start = GGUFValueType(kind), orig_offs + 12
        types = [GGUFValueType.ARRAY, item]
        if item is GGUFValueType.STRING:
            end = start
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", raw, end)[0]
            return end - orig_offs, [self._get(start, np.uint8, end - start)], [0], types
        if item not in self.gguf_scalar_to_np:
            raise ValueError(f"it has an array of type {item.name}")
        values = self._get(start, self.gguf_scalar_to_np[item], count)
        if len(values) != count:
            raise ValueError(f"an array of {count:,} values ends after {len(values):,}")
        return 12 + values.nbytes, [values], [0], types

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for name in (*self.fields, *(field.name for field in fields)):
            if not name.isprintable():  # messages show names
                raise ValueError(f"a name is {name!r}")
        for field in fields:
            _, _, _, dims, raw_type, offset = field.parts
            self._check_tensor(
                field.name, int(start_offs) + int(offset[0]), dims.tolist(), int(raw_type[0])
            )
        super()._build_tensors(start_offs, fields)

    def _check_tensor(self, name: str, start: int, dims: list[int], raw_type: int) -> None:
        try:
            kind = GGMLQuantizationType(raw_type)
        except ValueError:
            raise LoadFailed(
                f"{self._path}: {name} is of type {raw_type}, which is not known here"
            ) from None
        num_bytes = int(np.prod(gguf.quant_shape_to_byte_shape(dims[::-1], kind), dtype=object))
        if start + num_bytes > len(self.data):
            raise LoadFailed(
                f"{self._path} is cut short: {name} ends at byte {start + num_bytes:,}, "
                f"the file has {len(self.data):,}: download it again"
            )


def _string_spans(raw: bytes) -> list[tuple[int, int]]:
    """Where the strings of an array lie in its bytes."""
    places, start = [], 0
    while start < len(raw):
        (size,) = struct.unpack_from("<Q", raw, start)
        places.append((start + 8, start + 8 + size))
        start += 8 + size
    return places
