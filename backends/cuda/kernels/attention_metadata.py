"""Maps the rows of a step to sequences and to their pages in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Attention inputs of a ragged batch.

    Rows are tokens, grouped by sequence; the rows of a sequence are its last tokens.
    page_tables: int32 [sequences, pages]. query_starts: int32 [sequences + 1], first row of each
    sequence. seq_lens: int32 [sequences], tokens in the cache including these rows. max_query_len,
    max_seq_len: upper bounds of the rows and of the length of a sequence, not always tight.
    """

    page_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
