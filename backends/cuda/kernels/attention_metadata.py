"""Which rows of a step belong to which sequence, and where its tokens lie in the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Rows are tokens, sequence after sequence; those of a sequence are its last ones.

    page_tables: int32 [sequences, pages]. query_starts: int32 [sequences + 1], first row of each.
    seq_lens: int32 [sequences], tokens in the cache with these rows. max_query_len: no sequence has
    more rows. max_seq_len: none is longer. Both may be more than that.
    """

    page_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
