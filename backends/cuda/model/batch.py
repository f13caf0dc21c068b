"""One step as tensors: what every layer needs to know of the rows it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.cuda.kernels.attention_metadata import Ragged
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence as Seq

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A step on the host. Rows are tokens, chunk after chunk.

    tokens, slots: int64 [rows]; slots: page × PAGE_TOKENS + offset, -1: nothing is stored.
    outputs: int64 [sampled], rows whose logits are wanted. positions: int32 [rows].
    tables: int32 [chunks, pages]. starts: int32 [chunks + 1], first row of each chunk.
    lengths: int32 [chunks], tokens in the cache once the step is done. max_rows, max_len: as
    those of Ragged.
    """

    tokens: Longs
    slots: Longs
    outputs: Longs
    positions: Ints
    tables: Ints
    starts: Ints
    lengths: Ints
    max_rows: int
    max_len: int

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """In the order of a packed copy: the wide ones first, so that all are aligned."""
        return (
            *(self.tokens, self.slots, self.outputs),
            *(self.positions, self.tables, self.starts, self.lengths),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """StepInputs on the device."""

    tokens: Tensor
    slots: Tensor
    outputs: Tensor
    positions: Tensor
    ragged: Ragged


def arrange(chunks: Sequence[Chunk], table: Callable[[Seq], Ints]) -> StepInputs:
    """The inputs of a step. table: the pages of a sequence, in order."""
    lengths = np.array([chunk.start + len(chunk) for chunk in chunks], np.int32)
    rows = np.array([len(chunk) for chunk in chunks], np.int32)
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(rows, out=starts[1:])
    tables = np.zeros((len(chunks), pages_for(int(lengths.max()))), np.int32)
    positions = np.empty(starts[-1], np.int32)
    slots = np.empty(starts[-1], np.int64)
    outputs: list[int] = []
    for i, chunk in enumerate(chunks):
        pages = table(chunk.seq)[: pages_for(int(lengths[i]))]
        tables[i, : len(pages)] = pages
        here = np.arange(chunk.start, lengths[i], dtype=np.int32)
        own = slice(starts[i], starts[i + 1])
        positions[own] = here
        slots[own] = pages[here // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + here % PAGE_TOKENS
        if chunk.samples:
            outputs += range(starts[i + 1] - 1 - chunk.num_drafts, starts[i + 1])
    return StepInputs(
        tokens=np.fromiter((token for chunk in chunks for token in chunk.tokens), np.int64),
        slots=slots,
        outputs=np.array(outputs, np.int64),
        positions=positions,
        tables=tables,
        starts=starts,
        lengths=lengths,
        max_rows=int(rows.max()),
        max_len=int(lengths.max()),
    )


def pack(inputs: StepInputs, *, pinned: bool) -> Tensor:
    """All arrays of a step behind one another, uint8 in host memory."""
    arrays = inputs.arrays
    packed = torch.empty(sum(a.nbytes for a in arrays), dtype=torch.uint8, pin_memory=pinned)
    room, at = packed.numpy(), 0
    for array in arrays:
        room[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += array.nbytes
    return packed


def unpack(packed: Tensor, like: StepInputs) -> Batch:
    """Views of a packed copy, wherever it is. like: inputs of these shapes."""
    parts, at = [], 0
    for array in like.arrays:
        kind = torch.int64 if array.dtype == np.int64 else torch.int32
        parts.append(packed[at : at + array.nbytes].view(kind).view(array.shape))
        at += array.nbytes
    tokens, slots, outputs, positions, tables, starts, lengths = parts
    ragged = Ragged(tables, starts, lengths, like.max_rows, like.max_len)
    return Batch(tokens, slots, outputs, positions, ragged)


def on_device(inputs: StepInputs, device: torch.device) -> Batch:
    """The inputs on the device, in one copy that the host does not wait for."""
    packed = pack(inputs, pinned=device.type == "cuda")
    return unpack(packed.to(device, non_blocking=True), inputs)
