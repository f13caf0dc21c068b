"""Markdown tables as llama-bench prints them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def markdown_table(columns: Sequence[tuple[str, int]], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with llama-bench's alignment; negative widths align at the left."""
    if not lines:
        return ""
    widths = [
        max(abs(width), *(len(line[at]) for line in lines)) for at, (_, width) in enumerate(columns)
    ]

    def joined(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(size) if width < 0 else cell.rjust(size)
            for cell, (_, width), size in zip(cells, columns, widths, strict=True)
        )
        return f"| {' | '.join(aligned)} |"

    rule = [
        "-" * size if width < 0 else "-" * (size - 1) + ":"
        for (_, width), size in zip(columns, widths, strict=True)
    ]
    head = joined([name for name, _ in columns])
    return "\n".join([head, joined(rule), *map(joined, lines)])


def fits(table: str, width: int | None) -> bool:
    """True if a table fits a terminal of a width in columns; None: it has no width."""
    return width is None or len(table.split("\n", 1)[0]) <= width


def wrapped(text: str, width: int | None) -> str:
    """Text with its lines broken between words; those of tables stay."""
    if width is None:
        return text
    lines = text.split("\n")
    return "\n".join(line if line.startswith("|") else textwrap.fill(line, width) for line in lines)
