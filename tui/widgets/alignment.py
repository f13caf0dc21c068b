"""Text at both ends of a line."""

from __future__ import annotations

from textual.content import Content


def align_ends(left: Content, right: Content, width: int) -> Content:
    """One line with left and right text; only the left one if both do not fit."""
    gap = width - left.cell_length - right.cell_length
    if gap < 1:
        return left
    return Content.assemble(left, " " * gap, right)
