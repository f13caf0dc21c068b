"""Which rows of a step belong to which sequence, and where its tokens lie in the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows are tokens, sequence after sequence; those of a sequence are its last ones.

    tables: int32 [sequences, pages]. starts: int32 [sequences + 1], first row of each.
    lengths: int32 [sequences], tokens in the cache with these rows.
    max_rows: no sequence has more rows. max_len: none is longer. Both may be more than that.
    """

    tables: Tensor
    starts: Tensor
    lengths: Tensor
    max_rows: int
    max_len: int
