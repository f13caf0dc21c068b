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


class ActivationFile:
    """Input of layer `layer`, float32 [windows, length, hidden], in a file of the work folder.

    Files are written atomically, and a layer's file is kept until the next layer's is complete, so
    the input of the first unfinished layer survives any interruption. batch: windows at a time.
    """

    def __init__(
        self, folder: Path, shape: tuple[int, int, int], *, layer: int, batch: int
    ) -> None:
        self._folder, self._shape, self._batch = folder, shape, batch
        self.layer = layer

    @property
    def exists(self) -> bool:
        """The layer's file exists and is complete."""
        path = self._path(self.layer)
        return path.is_file() and path.stat().st_size == self.num_bytes

    @property
    def num_bytes(self) -> int:
        return 4 * int(torch.Size(self._shape).numel())

    def write_first_layer(self, embed: Callable[[slice], Tensor]) -> None:
        """Write the input of the first layer. embed: computes it for some windows."""
        with atomic_write(self._path(self.layer)) as path, path.open("wb") as file:
            for part in self._batch_slices():
                _append_states(file, embed(part))

    def batches(self) -> Iterator[Tensor]:
        """All states in order, `batch` windows at a time."""
        for part in self._batch_slices():
            yield self._read(part)

    def advance(self, run_layer: Callable[[Tensor], Tensor]) -> None:
        """Replace the states by the layer's output. `delete` the old file when the quantized layer
        is written."""
        with atomic_write(self._path(self.layer + 1)) as path, path.open("wb") as file:
            for part in self._batch_slices():
                _append_states(file, run_layer(self._read(part)))
        self.layer += 1

    def delete(self, layer: int) -> None:
        self._path(layer).unlink(missing_ok=True)

    def _batch_slices(self) -> Iterator[slice]:
        for first in range(0, self._shape[0], self._batch):
            yield slice(first, min(first + self._batch, self._shape[0]))

    def _read(self, windows: slice) -> Tensor:
        count = windows.stop - windows.start
        each = self._shape[1] * self._shape[2]
        found = np.fromfile(
            self._path(self.layer), np.float32, count * each, offset=4 * windows.start * each
        )
        return torch.from_numpy(found).view(count, *self._shape[1:])

    def _path(self, layer: int) -> Path:
        return self._folder / f"states-{layer:05d}.bin"


def _append_states(file: BinaryIO, states: Tensor) -> None:
    states.detach().cpu().contiguous().numpy().tofile(file)
