"""A safetensors file written tensor by tensor, and piece by piece, without ever holding it whole.

The safetensors library makes a second copy of all tensors before it writes the first.
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
    """One tensor of a file to be. chunks: its rows in order, of the dtype, as many at a time as
    whoever gives them likes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def streamed_tensor(tensor: Tensor) -> StreamedTensor:
    """A tensor that is in memory."""
    return StreamedTensor(tensor.dtype, tuple(tensor.shape), lambda: (tensor,))


def write_safetensors(path: Path, tensors: dict[str, StreamedTensor]) -> int:
    """Write a file that is there whole or not at all, even if the power fails. Its bytes.

    Equal entries give equal files. OSError: the disk is full.
    """
    # whatever takes more bytes comes first, so that every tensor is aligned
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    with atomic_write(path) as unfinished, unfinished.open("wb") as file:
        file.write(_header(ordered))
        for name, entry in ordered:
            start = file.tell()
            for piece in entry.chunks():
                assert piece.dtype == entry.dtype, name
                piece.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
            assert file.tell() - start == entry.num_bytes, name
    return path.stat().st_size


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A name to write to, whose file takes `path`'s place when all went well."""
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
    for name, entry, start in _with_offsets(ordered):
        offsets = [start, start + entry.num_bytes]
        fields[name] = {
            "dtype": SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _with_offsets(
    ordered: list[tuple[str, StreamedTensor]],
) -> Iterator[tuple[str, StreamedTensor, int]]:
    start = 0
    for name, entry in ordered:
        yield name, entry, start
        start += entry.num_bytes
