"""The safetensors files of a Hugging Face folder, one tensor at a time straight to the device."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from localgen.backends.errors import LoadFailed, ModelNotFound
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.hf.safetensors import (
    check_complete,
    read_safetensors_header,
    weight_files,
)

FLOAT_DTYPES = ("F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """A context manager: the tensors of one file, or of shards with an index, by name.

    Files are mapped, so on the CPU a tensor that keeps its dtype takes no memory of its own. Of a
    shard, tensors and their shapes are what it keeps; nothing else is read.
    Every reader raises LoadFailed naming the file and the tensor.
    """

    def __init__(self, folder: Path, device: torch.device, shard: ModelShard) -> None:
        """LoadFailed: no weights, a shard is missing, or a file is damaged."""
        self.folder = folder
        self._device = device
        self._shard = shard
        self._tensor_files: dict[str, tuple[Path, Any]] = {}
        self._unread_tensors: set[str] = set()
        self._exit_stack = ExitStack()
        with ExitStack() as undo:
            undo.push(self._exit_stack)
            for path in _weight_files(folder):
                file = self._exit_stack.enter_context(_open_safetensors(path))
                self._tensor_files.update(dict.fromkeys(file.keys(), (path, file)))
            undo.pop_all()
        self._unread_tensors.update(self._tensor_files)

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit_stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensor_files

    def unread_tensors(self) -> list[str]:
        """Names of the tensors that nobody has asked for, sorted."""
        return sorted(self._unread_tensors)

    def dtype(self, name: str) -> str:
        """A tensor's dtype as the file has it, such as BF16 or F8_E4M3."""
        return str(self._slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        whole = self._full_shape(name)
        cut = self._shard.slice_of(name, whole)
        return whole if cut is None else cut.shard_shape(whole)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        allowed_dtypes: tuple[str, ...] = FLOAT_DTYPES,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A tensor on the device. allowed_dtypes: dtypes it may have in the file; dtype: to convert
        to."""
        whole = self._full_shape(name)
        cut = self._shard.slice_of(name, whole)
        wanted = shape if cut is None else cut.full_shape(shape)
        if whole != wanted:
            raise self.load_error(name, f"is of shape {list(whole)}, not {list(wanted)}")
        if self.dtype(name) not in allowed_dtypes:
            raise self.load_error(
                name, f"is of type {self.dtype(name)}, not {' or '.join(allowed_dtypes)}"
            )
        path, file = self._tensor_files[name]
        try:
            found = file.get_tensor(name) if cut is None else cut.slice_tensor(self._slice(name))
        except (SafetensorError, OSError) as error:
            raise LoadFailed(f"{path}: {name} cannot be read: {error}") from None
        self._unread_tensors.discard(name)
        # first over, then converted: the device is faster at it and needs no host memory
        tensor: Tensor = found.to(self._device)
        if not self._shard.contributes(name):
            tensor = torch.zeros_like(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def load_error(self, name: str, reason: str) -> LoadFailed:
        """The error that a tensor cannot be used."""
        return LoadFailed(f"{self._tensor_files[name][0]}: {name} {reason}")

    def _full_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        if name not in self._tensor_files:
            raise LoadFailed(f"{self.folder} has no tensor {name}: download the whole model")
        return self._tensor_files[name][1].get_slice(name)


def _weight_files(folder: Path) -> list[Path]:
    try:
        return weight_files(folder)
    except ModelNotFound as error:
        raise LoadFailed(error.message) from None


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = LoadFailed(f"{path} cannot be read: {error}")
    try:
        tensors = read_safetensors_header(path)
    except LoadFailed:
        raise reason from None
    check_complete(path, tensors)
    raise reason
