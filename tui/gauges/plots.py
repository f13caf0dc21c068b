"""Bars and plots as text, readable without colours."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LEFT_EIGHTHS = " ▏▎▍▌▋▊▉"
# fills of the parts of a stacked bar, distinct without colours
BAR_FILLS = "█▓▒"
BAR_EMPTY = "░"


def plot(
    values: Sequence[float | None], width: int, rows: int, *, min_points: int, dots: bool = False
) -> list[str]:
    """Rows of a column plot over time, newest at the right, scaled from zero to the maximum.

    min_points: points that must fit. Each column is the mean of as many points as that takes,
    counted from the newest. Unknown values leave a gap; known ones have at least one eighth.
    dots: draw a dot for each column instead.
    """
    each = max(1, math.ceil(min_points / max(1, width)))
    columns = _downsample(values, each)[-width:]
    highest = max((value for value in columns if value), default=0.0)
    heights = [_bar_height(value, highest, rows * 8) for value in columns]
    lines = []
    for row in reversed(range(rows)):
        cells = [_dot(height, row) if dots else _column(height, row) for height in heights]
        lines.append("".join(cells).rjust(width))
    return lines


def _column(height: int, row: int) -> str:
    return _EIGHTHS[max(0, min(8, height - row * 8))]


def _dot(height: int, row: int) -> str:
    return "•" if row * 8 < height <= (row + 1) * 8 else " "


def plot_maximum(values: Sequence[float | None], width: int, *, min_points: int) -> float | None:
    """The value at the top of the same plot; None if no value is known."""
    columns = _downsample(values, max(1, math.ceil(min_points / max(1, width))))[-width:]
    return max((value for value in columns if value is not None), default=None)


def _downsample(values: Sequence[float | None], points_per_column: int) -> list[float | None]:
    # grouped from the newest point backwards
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
    """A bar filled to `fraction`, with a resolution of 1/8 character; dots if unknown."""
    if fraction is None:
        return "·" * width
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_LEFT_EIGHTHS[rest] if rest else "")
    return text + BAR_EMPTY * (width - len(text))


def stacked_bar(parts: Sequence[float], total: float, width: int) -> list[str]:
    """The pieces of a stacked bar: one per part, each with its own character, and the rest.

    A part above zero has at least one character.
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
