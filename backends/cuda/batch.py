"""One step as tensors: what every layer needs to know of the rows it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.cuda.kernels.ragged import Ragged
from localgen.backends.cuda.pages import PAGE_TOKENS, pages_for
from localgen.backends.engine.runner import Chunk
from localgen.backends.engine.sequence import Sequence as Seq

Pages = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows are tokens, chunk after chunk.

    tokens, slots: int64 [rows]; positions: int32 [rows]; slots: page × PAGE_TOKENS + offset.
    ragged: one sequence a chunk. outputs: int64 [sampled], rows whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    outputs: Tensor
    ragged: Ragged


def build(
    chunks: Sequence[Chunk], table: Callable[[Seq], Pages], device: torch.device | str
) -> Batch:
    """The batch of a step. table: the pages of a sequence, in order."""
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
    tokens = np.fromiter((token for chunk in chunks for token in chunk.tokens), np.int64)

    def there(array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        tokens=there(tokens),
        positions=there(positions),
        slots=there(slots),
        outputs=there(np.array(outputs, np.int64)),
        ragged=Ragged(
            there(tables), there(starts), there(lengths), int(rows.max()), int(lengths.max())
        ),
    )
