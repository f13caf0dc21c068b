"""Safetensors files written in chunks, without holding a whole file in memory.

The safetensors library copies all tensors before it writes the first one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """One tensor of a file to write. chunks: yields its rows in order, some at a time."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def streamed_tensor(tensor: Tensor) -> StreamedTensor:
    """A StreamedTensor of a tensor in memory."""
    return StreamedTensor(tensor.dtype, tuple(tensor.shape), lambda: (tensor,))


def write_safetensors(path: Path, tensors: dict[str, StreamedTensor]) -> int:
    """Write a file atomically and return its size. Equal tensors give equal files.

    Raises OSError if the disk is full.
    """
    # larger items first, so that every tensor is aligned
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    with atomic_write(path) as unfinished, unfinished.open("wb") as file:
        file.write(_header(ordered))
        for name, entry in ordered:
            start = file.tell()
            for chunk in entry.chunks():
                assert chunk.dtype == entry.dtype, name
                chunk.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
            assert file.tell() - start == entry.num_bytes, name
    return path.stat().st_size


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Temporary path to write to; it is synced and renamed to `path` on success."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _header(ordered: list[tuple[str, StreamedTensor]]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, entry in ordered:
        end = start + entry.num_bytes
        fields[name] = {
            "dtype": SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
