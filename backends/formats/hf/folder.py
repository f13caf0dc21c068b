"""A Hugging Face model folder: its JSON files and its tensors, read without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf.utility import LocalTensor, SafetensorsLocal
from numpy.typing import NDArray

from localgen.backends.errors import LoadFailed, ModelNotFound

# 64 MiB as float32
_CHUNK_VALUES = 1 << 24
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds. ModelNotFound: no such file. LoadFailed: not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LoadFailed(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise LoadFailed(f"{path} holds no JSON object")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As read_json; a file that is not there gives an empty object."""
    return read_json(path) if path.exists() else {}


class NumpyCheckpoint:
    """The tensors of a folder's safetensors files, one file or shards with an index.

    Opening reads the headers only and checks that every tensor lies within its file.
    """

    def __init__(self, folder: Path, override_folder: Path | None = None) -> None:
        """override_folder: a folder whose safetensors files have tensors to take in place of these.

        ModelNotFound: no weights, or a shard is missing. LoadFailed: a damaged file.
        """
        self._tensors: dict[str, LocalTensor] = {}
        for path in weight_files(folder):
            self._tensors.update(_read_header(path))
        for path in (
            sorted(override_folder.glob("*.safetensors")) if override_folder is not None else ()
        ):
            self._tensors.update(_read_header(path))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name].shape

    def dtypes(self) -> set[str]:
        """The types that tensors are stored in: F32, F16, BF16."""
        return {tensor.dtype for tensor in self._tensors.values()}

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor as float32: of F32 a view of the mapped file, of F16 and BF16 a copy."""
        return self._read(name, slice(None))

    def row_chunks(self, name: str) -> Iterator[NDArray[np.float32]]:
        """The same, some of its rows after the others."""
        rows, *rest = self.shape(name)
        step = max(1, _CHUNK_VALUES // math.prod(rest))
        for start in range(0, rows, step):
            yield self._read(name, slice(start, start + step))

    def _read(self, name: str, rows: slice) -> NDArray[np.float32]:
        tensor = self._tensors[name]
        raw = tensor.mmap_bytes()
        if tensor.dtype == "BF16":
            # bfloat16 is the upper half of a float32
            values = raw.view("<u2").reshape(tensor.shape)[rows].astype(np.uint32)
            values <<= 16
            return values.view(np.float32)
        stored = raw.view("<f4" if tensor.dtype == "F32" else "<f2")
        return stored.reshape(tensor.shape)[rows].astype(np.float32, copy=False)


def weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise LoadFailed(f"{index} has no weight_map")
        # a shard is a file of this folder: an index must not lead elsewhere
        files = [folder / Path(str(shard)).name for shard in sorted(set(weight_map.values()))]
    else:
        files = [folder / _SINGLE]
    for path in files:
        if not path.is_file():
            raise ModelNotFound(f"{folder} has no {path.name}: download the whole model")
    return files


def _read_header(path: Path) -> dict[str, LocalTensor]:
    try:
        tensors = SafetensorsLocal(path).tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise LoadFailed(f"{path} is no safetensors file or is cut short: {error}") from None
    file_bytes = path.stat().st_size
    for name, tensor in tensors.items():
        _check_range(path, name, tensor, file_bytes)
    return tensors


def _check_range(path: Path, name: str, tensor: LocalTensor, file_bytes: int) -> None:
    item_bytes = _ITEM_BYTES.get(tensor.dtype)
    if item_bytes is None:
        known = ", ".join(_ITEM_BYTES)
        raise LoadFailed(f"{path}: {name} is of type {tensor.dtype}, only {known} can be read")
    start, size = tensor.data_range.offset, tensor.data_range.size
    if start + size > file_bytes:
        raise LoadFailed(
            f"{path} is cut short: {name} ends at byte {start + size:,}, "
            f"the file has {file_bytes:,}: download it again"
        )
    if size <= 0 or size != item_bytes * int(np.prod(tensor.shape)):
        raise LoadFailed(f"{path}: {name} of shape {tensor.shape} cannot take {size:,} bytes")
