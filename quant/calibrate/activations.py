"""Hidden states of all windows between two layers, in a file that the page cache may keep in
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from localgen.quant.files.safetensors_writer import atomic_write


class ActivationFiles:
    """Inputs of layers, float32 [windows, length, hidden], in files of the work folder.

    Files are written atomically, and a layer's file is kept until it is deleted, so the input of
    the first unfinished layer survives any interruption. name: of the files. batch: windows at a
    time.
    """

    def __init__(
        self, folder: Path, shape: tuple[int, int, int], *, batch: int, name: str = "states"
    ) -> None:
        self._folder, self._shape, self._batch, self._name = folder, shape, batch, name

    def exists(self, layer: int) -> bool:
        """The layer's file exists and is complete."""
        path = self._path(layer)
        return path.is_file() and path.stat().st_size == self.num_bytes

    @property
    def num_bytes(self) -> int:
        return 4 * int(torch.Size(self._shape).numel())

    def write_first_layer(self, embed: Callable[[slice], Tensor]) -> None:
        """Write the input of the first layer. embed: computes it for some windows."""
        with atomic_write(self._path(0)) as path, path.open("wb") as file:
            for part in self._batch_slices():
                _append_states(file, embed(part))

    def batches(self, layer: int) -> Iterator[Tensor]:
        """All inputs of a layer in order, `batch` windows at a time."""
        for part in self._batch_slices():
            yield self._read(layer, part)

    def advance(self, layer: int, run_layer: Callable[[Tensor], Tensor]) -> None:
        """Write the input of the next layer. `delete` this layer's when its weights are written."""
        with atomic_write(self._path(layer + 1)) as path, path.open("wb") as file:
            for states in self.batches(layer):
                _append_states(file, run_layer(states))

    def delete(self, layer: int) -> None:
        self._path(layer).unlink(missing_ok=True)

    def _batch_slices(self) -> Iterator[slice]:
        for first in range(0, self._shape[0], self._batch):
            yield slice(first, min(first + self._batch, self._shape[0]))

    def _read(self, layer: int, windows: slice) -> Tensor:
        count = windows.stop - windows.start
        each = self._shape[1] * self._shape[2]
        found = np.fromfile(
            self._path(layer), np.float32, count * each, offset=4 * windows.start * each
        )
        return torch.from_numpy(found).view(count, *self._shape[1:])

    def _path(self, layer: int) -> Path:
        return self._folder / f"{self._name}-{layer:05d}.bin"


def _append_states(file: BinaryIO, states: Tensor) -> None:
    states.detach().cpu().contiguous().numpy().tofile(file)
