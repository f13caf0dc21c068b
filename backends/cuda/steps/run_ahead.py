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
from localgen.backends.runner.decode_step import DecodeStep
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence


@dataclass(slots=True, eq=False)
class RunAheadStep:
    """A forward pass launched ahead.

    logits: float32 [rows, vocab], valid until the next step of the executor. seqs, positions: the
    sequence and the position that each row computed. tables_version: of PagedCache, at the launch.
    """

    logits: Tensor
    seqs: tuple[Sequence, ...]
    positions: list[int]
    tables_version: int
    _discarded: set[Sequence] = field(default_factory=set)

    def split(self, chunks: Seq[Chunk]) -> tuple[Seq[Chunk], Seq[Chunk]]:
        """The chunks that this step computes, and the others.

        The former are a DecodeStep only if they are all rows of this step, in their order.
        """
        if self._is_of(chunks):
            return chunks, []
        positions = dict(zip(self.seqs, self.positions, strict=True))
        covered: list[Chunk] = []
        rest: list[Chunk] = []
        for chunk in chunks:
            is_valid = positions.get(chunk.seq) == chunk.start and is_decoding(chunk)
            if is_valid and chunk.seq not in self._discarded:
                covered.append(chunk)
            else:
                rest.append(chunk)
        return covered, rest

    def _is_of(self, chunks: Seq[Chunk]) -> bool:
        """True if these chunks are exactly the rows of this step."""
        return (
            isinstance(chunks, DecodeStep)
            and not self._discarded
            and chunks.seqs == self.seqs
            and chunks.starts == self.positions
        )

    def logits_of(self, chunks: Seq[Chunk]) -> Tensor:
        """Logits of these chunks, all covered, in their order."""
        row_of = {seq: row for row, seq in enumerate(self.seqs)}
        rows = [row_of[chunk.seq] for chunk in chunks]
        if rows == list(range(len(rows))):
            return self.logits[: len(rows)]
        (at,) = to_device([np.array(rows, np.int32)], self.logits.device)
        return self.logits.index_select(0, at)

    def invalidate(self, seq: Sequence) -> None:
        """Discard the result for a sequence, because its pages are about to change."""
        if seq in self.seqs:
            self._discarded.add(seq)


def is_decoding(chunk: Chunk) -> bool:
    """True if the chunk is one token and the next token is sampled after it."""
    return chunk.is_sampled and len(chunk.tokens) == 1


def next_step_inputs(
    positions: Seq[int] | Int32Array,
    page_tables: Callable[[int], Int32Array],
    source_rows: Seq[int],
) -> StepInputs:
    """Build the step after one token at each of these positions; its tokens are placeholders.

    page_tables: returns the first pages of each sequence, which has room for the new token, int32
    [sequences, pages]. source_rows: the row in which each sequence's token is sampled.
    """
    lengths = np.asarray(positions, np.int32) + 2
    following, rows, max_len = lengths - 1, np.arange(len(lengths)), int(lengths.max())
    # a table may be longer: with pages for drafts of a step that did not run
    tables = page_tables(pages_for(max_len))
    return StepInputs(
        tokens=np.zeros(len(rows), np.int64),
        slot_mapping=kv_slots(tables, rows, following),
        output_rows=rows,
        positions=following,
        page_tables=tables,
        query_starts=np.arange(len(rows) + 1, dtype=np.int32),
        seq_lens=lengths,
        max_query_len=1,
        max_seq_len=max_len,
        source_rows=np.array(source_rows, np.int32),
    )
