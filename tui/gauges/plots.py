"""Bars and plots as text. What they mean is in their characters, colours only help."""

from __future__ import annotations

import math
from collections.abc import Sequence

from textual.content import Content

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LEFT_EIGHTHS = " ▏▎▍▌▋▊▉"
# parts of a stacked bar, told apart without colours too
BAR_FILLS = "█▓▒"
BAR_EMPTY = "░"


def plot(values: Sequence[float | None], width: int, rows: int, *, min_points: int) -> list[str]:
    """Columns over time, the newest at the right, from zero up to their highest.

    min_points: how many there should at least be room for. Each column is the mean of as many as
    that takes, counted from the oldest kept one, so that columns do not change as they wander left.
    Where a value is not known there is nothing; next to zero is still a line.
    """
    each = max(1, math.ceil(min_points / max(1, width)))
    columns = _downsample(values, each)[-width:]
    highest = max((value for value in columns if value), default=0.0)
    heights = [_bar_height(value, highest, rows * 8) for value in columns]
    lines = []
    for row in reversed(range(rows)):
        cells = [_EIGHTHS[max(0, min(8, height - row * 8))] for height in heights]
        lines.append("".join(cells).rjust(width))
    return lines


def plot_maximum(values: Sequence[float | None], width: int, *, min_points: int) -> float | None:
    """What the top of such a plot stands for; None: no value is known."""
    columns = _downsample(values, max(1, math.ceil(min_points / max(1, width))))[-width:]
    return max((value for value in columns if value is not None), default=None)


def _downsample(values: Sequence[float | None], points_per_column: int) -> list[float | None]:
    # from the newest on: the last column is the one that is still growing
    columns: list[float | None] = []
    for end in range(len(values), 0, -points_per_column):
        known = [
            value for value in values[max(0, end - points_per_column) : end] if value is not None
        ]
        columns.append(sum(known) / len(known) if known else None)
    columns.reverse()
    return columns


def _bar_height(value: float | None, maximum: float, eighths: int) -> int:
    if value is None:
        return 0
    return max(1, round(value / maximum * eighths)) if maximum else 1


def bar(fraction: float | None, width: int) -> str:
    """A bar that is so full, to an eighth of a character."""
    if fraction is None:
        return "·" * width
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_LEFT_EIGHTHS[rest] if rest else "")
    return text + BAR_EMPTY * (width - len(text))


def stacked_bar(parts: Sequence[float], total: float, width: int) -> list[str]:
    """The pieces of a bar: one for each part, each with its own character, and what is left.

    A part that is there at all has a character at least.
    """
    if total <= 0:
        return ["" for _ in parts] + ["·" * width]
    left, pieces = width, []
    for part, fill in zip(parts, BAR_FILLS, strict=False):
        cells = max(1, round(part / total * width)) if part > 0 else 0
        cells = min(left, cells)
        pieces.append(fill * cells)
        left -= cells
    return [*pieces, BAR_EMPTY * left]


def align_ends(left: Content, right: Content, width: int) -> Content:
    """One line, an end each; where not both fit, the left one alone."""
    gap = width - left.cell_length - right.cell_length
    if gap < 1:
        return left
    return Content.assemble(left, " " * gap, right)
