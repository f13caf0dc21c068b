"""Run-ahead: launch the next forward pass before the scheduler requests it.

While a decode step is in flight, the next one is nearly certain: each sequence continues with the
token just sampled, which is already on the device. Launching its forward pass at once keeps the GPU
busy while the host reads results and schedules. If the scheduler requests the same step, its logits
are sampled then, when the host knows all tokens before it: grammars, penalties and logprobs need
nothing special. If a sequence has ended, its row is ignored. The KV that such a row wrote lies
beyond the valid tokens of the sequence, and later steps run after it on the device, so reusing its
page is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model.batch import Int32Array, StepInputs, kv_slots
from localgen.backends.cuda.model.host_copy import to_device
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence


@dataclass(slots=True, eq=False)
class RunAheadStep:
    """A forward pass launched ahead.

    logits: float32 [rows, vocab], valid until the next step of the executor. positions: the
    position computed for each sequence, in row order.
    """

    logits: Tensor
    positions: dict[Sequence, int]
    rows: dict[Sequence, int] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {seq: row for row, seq in enumerate(self.positions)}

    def split(self, chunks: Seq[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """The chunks that this step computes, and the others."""
        covered: list[Chunk] = []
        rest: list[Chunk] = []
        positions = self.positions
        for chunk in chunks:
            if positions.get(chunk.seq) == chunk.start and is_decoding(chunk):
                covered.append(chunk)
            else:
                rest.append(chunk)
        return covered, rest

    def logits_of(self, chunks: list[Chunk]) -> Tensor:
        """Logits of these chunks, all covered, in their order."""
        rows = [self.rows[chunk.seq] for chunk in chunks]
        if rows == list(range(len(rows))):
            return self.logits[: len(rows)]
        (at,) = to_device([np.array(rows, np.int32)], self.logits.device)
        return self.logits.index_select(0, at)

    def invalidate(self, seq: Sequence) -> None:
        """Discard the result for a sequence, because its pages are about to change."""
        self.positions.pop(seq, None)


def is_decoding(chunk: Chunk) -> bool:
    """True if the chunk is one token and the next token is sampled after it."""
    return chunk.is_sampled and len(chunk.tokens) == 1


def next_step_inputs(
    chunks: Seq[Chunk], page_tables: Callable[[int], Int32Array], source_rows: Seq[int]
) -> StepInputs:
    """Build the step after these one-token chunks; its tokens are placeholders.

    page_tables: returns the first pages of each chunk's sequence, which has room for the new token,
    int32 [chunks, pages]. source_rows: the row in which each chunk's token is sampled.
    """
    lengths = np.array([chunk.start + 2 for chunk in chunks], np.int32)
    positions, rows, max_len = lengths - 1, np.arange(len(chunks)), int(lengths.max())
    # a table may be longer: with pages for drafts of a step that did not run
    tables = page_tables(pages_for(max_len))
    return StepInputs(
        tokens=np.zeros(len(chunks), np.int64),
        slot_mapping=kv_slots(tables, rows, positions),
        output_rows=rows,
        positions=positions,
        page_tables=tables,
        query_starts=np.arange(len(chunks) + 1, dtype=np.int32),
        seq_lens=lengths,
        max_query_len=1,
        max_seq_len=max_len,
        source_rows=np.array(source_rows, np.int32),
    )
