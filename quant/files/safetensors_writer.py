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

NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file to be. pieces: its rows in order, of the dtype, as many at a time as
    whoever gives them likes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def entry_of(tensor: Tensor) -> Entry:
    """A tensor that is in memory."""
    return Entry(tensor.dtype, tuple(tensor.shape), lambda: (tensor,))


def write(path: Path, entries: dict[str, Entry]) -> int:
    """Write a file that is there whole or not at all, even if the power fails. Its bytes.

    Equal entries give equal files. OSError: the disk is full.
    """
    # whatever takes more bytes comes first, so that every tensor is aligned
    ordered = sorted(entries.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(_header(ordered))
        for name, entry in ordered:
            start = file.tell()
            for piece in entry.pieces():
                assert piece.dtype == entry.dtype, name
                piece.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
            assert file.tell() - start == entry.num_bytes, name
    return path.stat().st_size


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
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


def _header(ordered: list[tuple[str, Entry]]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, entry, start in _placed(ordered):
        offsets = [start, start + entry.num_bytes]
        fields[name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _placed(ordered: list[tuple[str, Entry]]) -> Iterator[tuple[str, Entry, int]]:
    start = 0
    for name, entry in ordered:
        yield name, entry, start
        start += entry.num_bytes
