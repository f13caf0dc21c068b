"""The safetensors files of a Hugging Face folder, one tensor at a time straight to the device."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.fields import Fields
from localgen.backends.formats.architecture.sharding import Shard

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
FLOATS = ("F32", "F16", "BF16")


class Checkpoint:
    """A context manager: the tensors of one file, or of shards with an index, by name.

    Files are mapped, so on the CPU a tensor that keeps its dtype takes no memory of its own. Of a
    shard, tensors and their shapes are what it keeps; nothing else is read.
    Every reader raises LoadFailed naming the file and the tensor.
    """

    def __init__(self, folder: Path, device: torch.device, shard: Shard) -> None:
        """LoadFailed: no weights, a shard is missing, or a file is damaged."""
        self.folder = folder
        self._device = device
        self._shard = shard
        self._files: dict[str, tuple[Path, Any]] = {}
        self._unread: set[str] = set()
        self._open = ExitStack()
        with ExitStack() as undo:
            undo.push(self._open)
            for path in _weight_files(folder):
                file = self._open.enter_context(_open(path))
                self._files.update(dict.fromkeys(file.keys(), (path, file)))
            undo.pop_all()
        self._unread.update(self._files)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def unread(self) -> list[str]:
        """Names of the tensors that nobody has asked for, sorted."""
        return sorted(self._unread)

    def dtype(self, name: str) -> str:
        """A tensor's dtype as the file has it, such as BF16 or F8_E4M3."""
        return str(self._slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        whole = self._whole_shape(name)
        cut = self._shard.cut(name, whole)
        return whole if cut is None else cut.share(whole)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        stored: tuple[str, ...] = FLOATS,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A tensor on the device. stored: dtypes it may have in the file; dtype: to convert to."""
        whole = self._whole_shape(name)
        cut = self._shard.cut(name, whole)
        wanted = shape if cut is None else cut.whole(shape)
        if whole != wanted:
            raise self.refusal(name, f"is of shape {list(whole)}, not {list(wanted)}")
        if self.dtype(name) not in stored:
            raise self.refusal(name, f"is of type {self.dtype(name)}, not {' or '.join(stored)}")
        path, file = self._files[name]
        try:
            found = file.get_tensor(name) if cut is None else cut.taken(self._slice(name))
        except (SafetensorError, OSError) as error:
            raise LoadFailed(f"{path}: {name} cannot be read: {error}") from None
        self._unread.discard(name)
        # first over, then converted: the device is faster at it and needs no host memory
        tensor: Tensor = found.to(self._device)
        if not self._shard.counts(name):
            tensor = torch.zeros_like(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def refusal(self, name: str, reason: str) -> LoadFailed:
        """The error that a tensor cannot be used."""
        return LoadFailed(f"{self._files[name][0]}: {name} {reason}")

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise LoadFailed(f"{self.folder} has no tensor {name}: download the whole model")
        return self._files[name][1].get_slice(name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        weight_map = Fields.of_file(index).section("weight_map")
        if weight_map is None:
            raise LoadFailed(f"{index} has no weight_map")
        # a shard is a file of this folder: an index must not lead elsewhere
        names = sorted({Path(weight_map.text(tensor)).name for tensor in weight_map.values})
    else:
        names = [_SINGLE]
    for name in names:
        if not (folder / name).is_file():
            raise LoadFailed(f"{folder} has no {name}: download the whole model")
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadFailed(_damage(path) or f"{path} cannot be read: {error}") from None


def _damage(path: Path) -> str | None:
    """Which tensor is not wholly there, of a file that cannot be opened; None: it is not that."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(header_bytes, 100_000_000)))
        start, size = 8 + header_bytes, path.stat().st_size
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_"}
        cut = [name for name, end in sorted(ends.items(), key=lambda x: x[1]) if start + end > size]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    if not cut:
        return None
    return (
        f"{path} is cut short: {cut[0]} ends at byte {start + ends[cut[0]]:,}, "
        f"the file has {size:,}: download it again"
    )
