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
from localgen.backends.cuda.model.batch import Ints, StepInputs
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import SamplingParams


@dataclass(slots=True, eq=False)
class Lookahead:
    """A step launched ahead. starts: the position each sequence is computed at, by its row.

    tokens: int64 [rows], what was sampled. shown: what from, of rows that show it.
    """

    tokens: Tensor
    starts: dict[Sequence, int]
    shown: dict[int, Tensor]
    rows: dict[Sequence, int] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {seq: row for row, seq in enumerate(self.starts)}

    def covers(self, chunk: Chunk) -> bool:
        """Whether it computes this chunk."""
        return is_decoding(chunk) and self.starts.get(chunk.seq) == chunk.start

    def forget(self, seq: Sequence) -> None:
        """The room of this sequence changes: what was computed for it is void."""
        self.starts.pop(seq, None)


def is_decoding(chunk: Chunk) -> bool:
    """Whether a chunk is one token that another follows."""
    return len(chunk) == 1 and chunk.samples


def can_go_on(chunk: Chunk) -> bool:
    """Whether what follows this chunk can be computed by who does not know its token."""
    params, matcher = chunk.seq.params, chunk.seq.matcher
    unseen = not looks_back(params) and params.logprobs is None and matcher is None
    return is_decoding(chunk) and unseen


def looks_back(params: SamplingParams) -> bool:
    """Whether a sampler looks at the tokens before."""
    return bool(params.repeat_last_n) and (
        params.repeat_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)
    )


def next_inputs(chunks: list[Chunk], tables: list[Ints]) -> StepInputs:
    """The step after these chunks of one token each. tables: pages of each, with room for it.

    Its tokens are not known to the host.
    """
    positions = np.array([chunk.start + 1 for chunk in chunks], np.int32)
    width = max(map(len, tables))
    padded = np.zeros((len(chunks), width), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    rows = np.arange(len(chunks))
    pages = padded[rows, positions // PAGE_TOKENS].astype(np.int64)
    return StepInputs(
        tokens=np.zeros(len(chunks), np.int64),
        slots=pages * PAGE_TOKENS + positions % PAGE_TOKENS,
        outputs=rows,
        positions=positions,
        tables=padded,
        starts=np.arange(len(chunks) + 1, dtype=np.int32),
        lengths=positions + 1,
        max_rows=1,
        max_len=int(positions.max()) + 1,
    )
