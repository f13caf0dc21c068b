"""The next step of sequences that decode, launched before anyone asked for it.

When a step of single tokens is on its way, what comes next is nearly certain: each sequence goes on
with the token just sampled, which is on the device already. Launching that at once keeps the GPU
busy while the host reads results and plans. If the plan agrees, its step is half done; if a
sequence has ended, its row is ignored. What the row wrote lies behind all that counts of the
sequence, and later steps come after it on the device, whoever owns the page by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.model.batch import Int32Array, StepInputs
from localgen.backends.cuda.steps.sampler import uses_penalties
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence


@dataclass(slots=True, eq=False)
class RunAheadStep:
    """A step launched ahead. positions: the position each sequence is computed at, by its row.

    tokens: int64 [rows], what was sampled. probs_by_row: what from, of rows that show it.
    """

    tokens: Tensor
    positions: dict[Sequence, int]
    probs_by_row: dict[int, Tensor]
    rows: dict[Sequence, int] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {seq: row for row, seq in enumerate(self.positions)}

    def covers(self, chunk: Chunk) -> bool:
        """Whether it computes this chunk."""
        return is_decoding(chunk) and self.positions.get(chunk.seq) == chunk.start

    def invalidate(self, seq: Sequence) -> None:
        """The room of this sequence changes: what was computed for it is void."""
        self.positions.pop(seq, None)


def is_decoding(chunk: Chunk) -> bool:
    """Whether a chunk is one token that another follows."""
    return len(chunk) == 1 and chunk.is_sampled


def can_run_ahead(chunk: Chunk) -> bool:
    """Whether what follows this chunk can be computed by who does not know its token."""
    params, matcher = chunk.seq.params, chunk.seq.matcher
    unseen = not uses_penalties(params) and params.logprobs is None and matcher is None
    return is_decoding(chunk) and unseen


def next_step_inputs(chunks: list[Chunk], page_tables: list[Int32Array]) -> StepInputs:
    """The step after these chunks of one token each. page_tables: pages of each, with room for it.

    Its tokens are not known to the host.
    """
    positions = np.array([chunk.start + 1 for chunk in chunks], np.int32)
    width = max(map(len, page_tables))
    padded = np.zeros((len(chunks), width), np.int32)
    for row, table in zip(padded, page_tables, strict=True):
        row[: len(table)] = table
    rows = np.arange(len(chunks))
    pages = padded[rows, positions // PAGE_TOKENS].astype(np.int64)
    return StepInputs(
        tokens=np.zeros(len(chunks), np.int64),
        slot_mapping=pages * PAGE_TOKENS + positions % PAGE_TOKENS,
        output_rows=rows,
        positions=positions,
        page_tables=padded,
        query_starts=np.arange(len(chunks) + 1, dtype=np.int32),
        seq_lens=positions + 1,
        max_query_len=1,
        max_seq_len=int(positions.max()) + 1,
    )
