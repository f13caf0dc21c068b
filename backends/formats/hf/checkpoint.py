"""Tensors of a Hugging Face model folder, loaded one by one to the device with torch."""

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
    FLOAT_DTYPES,
    check_complete,
    read_safetensors_header,
    weight_files,
)
from localgen.backends.formats.hf.text_part import text_tensor_name


class SafetensorsCheckpoint:
    """A context manager: the tensors of a model folder by name; of one with images, of its text.

    Files are mapped, so on the CPU a tensor that keeps its dtype takes no extra memory. Tensors and
    their shapes are those of the rank's shard, and only that part is read.
    Every reader raises LoadFailed, naming the file and the tensor.
    """

    def __init__(self, folder: Path, device: torch.device, shard: ModelShard) -> None:
        """Raises LoadFailed if a file is missing or damaged."""
        self.folder = folder
        self._device = device
        self._shard = shard
        # path, file, and name in the file
        self._tensor_files: dict[str, tuple[Path, Any, str]] = {}
        self._unread_tensors: set[str] = set()
        self._exit_stack = ExitStack()
        with ExitStack() as undo:
            undo.push(self._exit_stack)
            for path in _weight_files(folder):
                file = self._exit_stack.enter_context(_open_safetensors(path))
                for stored in file.keys():  # noqa: SIM118  not a mapping
                    name = text_tensor_name(stored) if shard.spec.text_only else stored
                    if name is not None:
                        self._tensor_files[name] = path, file, stored
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
        """Names of the tensors that have not been read, sorted."""
        return sorted(self._unread_tensors)

    def dtype(self, name: str) -> str:
        """Dtype of a tensor as the file names it, for example BF16 or F8_E4M3."""
        return str(self._slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
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
        """Read a tensor to the device.

        shape: expected shape. allowed_dtypes: dtypes it may have in the file. dtype: dtype to
        convert to, or None for that of the file.
        """
        whole = self._full_shape(name)
        cut = self._shard.slice_of(name, whole)
        wanted = shape if cut is None else cut.full_shape(shape)
        if whole != wanted:
            raise self.load_error(name, f"is of shape {list(whole)}, not {list(wanted)}")
        if self.dtype(name) not in allowed_dtypes:
            raise self.load_error(
                name, f"is of type {self.dtype(name)}, not {' or '.join(allowed_dtypes)}"
            )
        path, file, stored = self._tensor_files[name]
        try:
            found = file.get_tensor(stored) if cut is None else cut.slice_tensor(self._slice(name))
        except (SafetensorError, OSError) as error:
            raise LoadFailed(f"{path}: {name} cannot be read: {error}") from None
        self._unread_tensors.discard(name)
        # converted on the device, which is faster and needs no host memory
        tensor: Tensor = found.to(self._device)
        if not self._shard.contributes(name):
            tensor = torch.zeros_like(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def load_error(self, name: str, reason: str) -> LoadFailed:
        """An error to raise about a tensor, naming its file."""
        path, _, stored = self._tensor_files[name]
        return LoadFailed(f"{path}: {stored} {reason}")

    def _full_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        if name not in self._tensor_files:
            raise LoadFailed(f"{self.folder} has no tensor {name}: download the whole model")
        _, file, stored = self._tensor_files[name]
        return file.get_slice(stored)


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
