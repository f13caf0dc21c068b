"""Safetensors files of a model folder: headers, and tensors as numpy arrays, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localgen.backends.errors import LoadFailed, ModelNotFound
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.hf.folder import shard_names

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
# 64 MiB as float32
_CHUNK_VALUES = 1 << 24
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
FLOAT_DTYPES = tuple(_ITEM_BYTES)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in a file. dtype: as the file names it, for example F16."""

    path: Path
    start: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: one, or the shards of its index.

    Raises ModelNotFound if one is missing, LoadFailed if the index is damaged.
    """
    names = shard_names(folder)
    if names is None:
        names = [_SINGLE]
    for name in names:
        if not (folder / name).is_file():
            raise ModelNotFound(f"{folder} has no {name}: download the whole model")
    return [folder / name for name in names]


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, sorted.

    Raises LoadFailed if the file is not safetensors. Tensors may lie beyond its end.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            content = file.read(min(size, _MAX_HEADER_BYTES))
    except OSError as error:
        raise LoadFailed(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        header = ConfigFields.parse(content, path)
    except LoadFailed as error:
        raise LoadFailed(f"{error.message}, so it is not a valid safetensors file") from None
    names = sorted(header.values.keys() - {"__metadata__"})
    return {name: _stored_tensor(header, name, 8 + size) for name in names}


def check_complete(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise LoadFailed, naming the first tensor that is cut off, if a file is too short."""
    file_bytes = path.stat().st_size
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        end = tensor.start + tensor.num_bytes
        if end > file_bytes:
            raise LoadFailed(
                f"{path} is cut short: {name} ends at byte {end:,}, "
                f"the file has {file_bytes:,}: download it again"
            )


def read_checked_header(path: Path, item_bytes: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Like read_safetensors_header, for files whose tensors are going to be read.

    item_bytes: size of an element, by dtype. Raises LoadFailed if the file is cut short, or if a
    tensor is of another dtype or does not have the bytes of its shape.
    """
    tensors = read_safetensors_header(path)
    check_complete(path, tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in item_bytes:
            known = ", ".join(item_bytes)
            raise LoadFailed(f"{path}: {name} is of type {tensor.dtype}, only {known} can be read")
        if tensor.num_bytes != item_bytes[tensor.dtype] * math.prod(tensor.shape):
            raise LoadFailed(
                f"{path}: {name} has {tensor.num_bytes:,} bytes, which do not match its shape "
                f"{list(tensor.shape)}"
            )
    return tensors


class FloatTensors:
    """The F32, F16 and BF16 tensors of files. Only the headers are read on opening."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Of tensors of the same name the last one counts. Raises LoadFailed for a damaged file."""
        self._tensors: dict[str, StoredTensor] = {}
        for path in files:
            self._tensors |= read_checked_header(path, _ITEM_BYTES)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtypes(self) -> set[str]:
        """Return the dtypes of the tensors: F32, F16, BF16."""
        return {tensor.dtype for tensor in self._tensors.values()}

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32: of F32 a view of the mapped file, of F16 and BF16 a copy."""
        return self._read(name, slice(None))

    def row_chunks(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor as float32, some rows at a time."""
        rows, *rest = self.shape(name)
        step = max(1, _CHUNK_VALUES // math.prod(rest))
        for start in range(0, rows, step):
            yield self._read(name, slice(start, start + step))

    def _read(self, name: str, rows: slice) -> NDArray[np.float32]:
        import numpy as np  # headers do without it

        tensor = self._tensors[name]
        if not tensor.num_bytes:
            raise LoadFailed(f"{tensor.path}: {name} of shape {list(tensor.shape)} is empty")
        raw = np.memmap(
            tensor.path, np.uint8, mode="c", offset=tensor.start, shape=tensor.num_bytes
        )
        if tensor.dtype == "BF16":
            # bfloat16 is the upper half of a float32
            values = raw.view("<u2").reshape(tensor.shape)[rows].astype(np.uint32)
            values <<= 16
            return values.view(np.float32)
        stored = raw.view("<f4" if tensor.dtype == "F32" else "<f2")
        return stored.reshape(tensor.shape)[rows].astype(np.float32, copy=False)


class NumpyCheckpoint(FloatTensors):
    """The tensors of a model folder."""

    def __init__(self, folder: Path, override_folder: Path | None = None) -> None:
        """override_folder: a folder whose safetensors files replace tensors of the same names.

        Raises ModelNotFound if a file is missing, LoadFailed if one is damaged.
        """
        files = weight_files(folder)
        if override_folder is not None:
            files += sorted(override_folder.glob("*.safetensors"))
        super().__init__(files)


def _stored_tensor(header: ConfigFields, name: str, start: int) -> StoredTensor:
    entry = header.section(name)
    if entry is None:
        raise header.load_error(f"{name} is null")
    offsets, shape = entry.sizes("data_offsets"), entry.sizes("shape")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise entry.invalid_value("data_offsets", "the begin and the end of the tensor")
    if math.prod(shape) >= 2**63:
        raise entry.invalid_value("shape", "the shape of a tensor that fits into memory")
    first, end = offsets
    return StoredTensor(header.path, start + first, end - first, entry.string("dtype"), shape)
