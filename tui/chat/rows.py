"""Rows of a transcript, and the names that their segments carry."""

from __future__ import annotations

from rich.segment import Segment

# keys of a segment's meta: what a click on it does
COPY, FOLD = "copy", "fold"
# styles of whole rows
PROMPT, MUTED, WARNING = "prompt", "muted", "warning"

# not a Strip, which has seven caches: of a long answer the garbage collector would visit all
Row = tuple[Segment, ...]


def row_text(row: Row) -> str:
    """The text of a row, without trailing spaces."""
    return "".join(segment.text for segment in row).rstrip()
