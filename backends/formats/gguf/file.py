"""A GGUF model: a file or the parts of a split one, with tensors dequantized on reading."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.sharding import ShardSlice
from localgen.backends.formats.gguf.reader import GgufReader, GgufTensor

_SPLIT_SUFFIX = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# values dequantized at a time: 64 MiB as float32
_CHUNK_VALUES = 1 << 24


class GgufFile:
    """The metadata of the first part and the tensors of all parts.

    Every reader raises LoadFailed, naming the file.
    """

    def __init__(self, path: Path) -> None:
        """path: the file, or any part of it. Raises LoadFailed if a part is missing or damaged."""
        self.path, *others = _split_files(path)
        self._reader = GgufReader(self.path)
        self._tensors: dict[str, tuple[Path, GgufTensor]] = {}
        for part, reader in ((self.path, self._reader), *((p, GgufReader(p)) for p in others)):
            for tensor in reader.tensors:
                if tensor.name in self._tensors:
                    raise LoadFailed(f"{part}: {tensor.name} is also in another part")
                self._tensors[tensor.name] = part, tensor
        self._check_split_count(1 + len(others))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def section(self, prefix: str) -> ConfigFields:
        """The metadata with this prefix, by the rest of the key."""
        keys = [key for key in self._reader if key.startswith(prefix)]
        values = {key.removeprefix(prefix): self._reader.value(key) for key in keys}
        return ConfigFields(self.path, values, prefix)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self._tensor(name)[1].shape

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        device: torch.device,
        dtype: torch.dtype,
        shard_slice: ShardSlice | None = None,
    ) -> Tensor:
        """Read a tensor, dequantized, to the device. shape: expected shape, of the shard if any."""
        _, entry = self._tensor(name)
        whole = shape if shard_slice is None else shard_slice.full_shape(shape)
        if self.shape(name) != whole:
            raise self.load_error(name, f"is of shape {list(self.shape(name))}, not {list(whole)}")
        kind = entry.type_name
        rows = _shard_rows(entry.data.reshape(*whole[:-1], -1), shard_slice)
        columns = (
            shard_slice if shard_slice is not None and shard_slice.axis == len(whole) - 1 else None
        )
        target = torch.empty(rows.shape[0], shape[-1], device=device, dtype=dtype)
        step = max(1, _CHUNK_VALUES // whole[-1])
        try:
            for first in range(0, len(rows), step):
                values = _dequantize_rows(rows[first : first + step], kind)
                values = (
                    values if columns is None else replace(columns, axis=1).slice_tensor(values)
                )
                target[first : first + step] = values.to(device)
        except NotImplementedError:
            raise self.load_error(name, f"is of type {kind}, which is not supported") from None
        return target.view(shape)

    def load_error(self, name: str, reason: str) -> LoadFailed:
        """An error to raise about a tensor, naming its file."""
        return LoadFailed(f"{self._tensors[name][0]}: {name} {reason}")

    def _tensor(self, name: str) -> tuple[Path, GgufTensor]:
        if name not in self._tensors:
            raise LoadFailed(f"{self.path} has no tensor {name}")
        return self._tensors[name]

    def _check_split_count(self, num_opened: int) -> None:
        split = self.section("split.")
        count = split.positive_int("count", 1) if split.values.get("count") else 1
        if count != num_opened:
            raise LoadFailed(
                f"{self.path} is one of {count} parts, {num_opened} found by name: names must end "
                f"in -00001-of-{count:05}.gguf and so on"
            )
        total = split.values.get("tensors.count", len(self._tensors))
        if total != len(self._tensors):
            raise LoadFailed(
                f"{self.path} and its parts have {len(self._tensors)} tensors, not {total}"
            )


def _shard_rows(data: NDArray[Any], shard_slice: ShardSlice | None) -> NDArray[Any]:
    """Return the rows of a shard: [rows, bytes]. data: [..., rows, bytes]."""
    if shard_slice is not None and shard_slice.axis < data.ndim - 1:
        before = (slice(None),) * shard_slice.axis
        parts = [data[(*before, kept)] for kept in shard_slice.slices(data.shape[shard_slice.axis])]
        data = parts[0] if len(parts) == 1 else np.concatenate(parts, shard_slice.axis)
    return data.reshape(-1, data.shape[-1])


def _dequantize_rows(rows: NDArray[Any], kind: str) -> Tensor:
    """Dequantize rows to a float dtype. Raises NotImplementedError for unsupported types."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind in _TORCH_DTYPES:
        # copied, as torch requires writable memory
        return torch.from_numpy(np.array(rows)).view(_TORCH_DTYPES[kind])
    with np.errstate(all="ignore"):  # NaN is not checked for here
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))


def _split_files(path: Path) -> list[Path]:
    """All parts of the split file that a path belongs to, or the path alone."""
    match = _SPLIT_SUFFIX.search(path.name)
    if match is None:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise LoadFailed(f"{path.parent} has no {part.name}: download all {count} parts")
    return parts or [path]
