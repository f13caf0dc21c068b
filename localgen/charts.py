"""Line charts with logarithmic axes as text, readable without colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_DOT_COLUMNS, _DOT_ROWS = 2, 4
_BRAILLE = 0x2800
# bits of a Braille character by row and column of the dot
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
# dots drawn and left out in turn: whole lines first
_DASHES = ((1, 0), (6, 3), (2, 3), (12, 3), (1, 4))
_MIN_PLOT_COLUMNS = 20
# so that a line that hardly rises is flat
_Y_MARGIN = 1.1
_MAX_LABEL_COLUMNS = 32

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Points with positive coordinates, by rising x.

    mark: a character drawn at each point; None: the points are joined by a line, with the name at
    its end.
    """

    name: str
    points: Sequence[Point]
    mark: str | None = None


def log_chart(
    series: Sequence[Series],
    width: int,
    rows: int,
    *,
    x_title: str,
    y_title: str,
    format_x: Callable[[float], str],
    format_y: Callable[[float], str],
) -> list[str]:
    """Lines of a chart, both axes logarithmic.

    width: columns of the whole chart; rows: of the plot alone. Empty if there are no points.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return []
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    low, high = min(ys) / _Y_MARGIN, max(ys) * _Y_MARGIN
    y_labels = max(len(format_y(y)) for y in _ticks(low, high, rows, 2, _DECIMALS))
    lines = [one for one in drawn if one.mark is None]
    label_columns = min(_MAX_LABEL_COLUMNS, max((len(one.name) for one in lines), default=0))
    columns = max(_MIN_PLOT_COLUMNS, width - y_labels - label_columns - 4)
    plot = _Plot(_Axis(min(xs), max(xs), columns), _Axis(low, high, rows))
    for index, one in enumerate(lines):
        plot.draw_line(one.points, _DASHES[index % len(_DASHES)])
    for one in drawn:
        if one.mark is not None:
            plot.draw_marks(one.points, one.mark)
    names = plot.label_rows(lines)
    return plot.lines(y_labels, names, format_x, format_y, x_title, y_title)


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic axis over a number of characters."""

    low: float
    high: float
    cells: int

    def share(self, value: float) -> float:
        """Position of a value from 0 to 1."""
        if self.high <= self.low:
            return 0.5
        return math.log(value / self.low) / math.log(self.high / self.low)

    def cell(self, value: float) -> int:
        return round(self.share(value) * (self.cells - 1))


class _Plot:
    def __init__(self, x: _Axis, y: _Axis) -> None:
        self._x, self._y = x, y
        self._dots = [[0] * x.cells for _ in range(y.cells)]
        self._marks: dict[tuple[int, int], str] = {}

    def draw_line(self, points: Sequence[Point], dashes: tuple[int, int]) -> None:
        """Join the points by a dashed line, interpolated between them."""
        points = [*points, points[-1]]  # a single point is a dot
        last: int | None = None
        drawn, left_out = dashes
        for column in range(self._x.cells * _DOT_COLUMNS):
            height = self._height_at(points, column)
            if height is None:
                continue
            if column % (drawn + left_out) < drawn:
                # a steep line is drawn without gaps between its columns
                begin = height if last is None else last
                for row in range(min(height, begin), max(height, begin) + 1):
                    self._dot(column, row)
            last = height

    def _height_at(self, points: Sequence[Point], column: int) -> int | None:
        """Row of the dot of a line in a column of dots; None outside of it."""
        dots = self._x.cells * _DOT_COLUMNS - 1
        for (x0, y0), (x1, y1) in pairwise(points):
            first, last = self._x.share(x0) * dots, self._x.share(x1) * dots
            if first - 0.5 <= column <= last + 0.5:
                along = (column - first) / (last - first) if last > first else 0.0
                y = self._y.share(y0) + (self._y.share(y1) - self._y.share(y0)) * along
                return self._dot_height(y)
        return None

    def _dot(self, column: int, height: int) -> None:
        row = self._y.cells * _DOT_ROWS - 1 - height
        self._dots[row // _DOT_ROWS][column // _DOT_COLUMNS] |= _BITS[row % _DOT_ROWS][
            column % _DOT_COLUMNS
        ]

    def draw_marks(self, points: Sequence[Point], mark: str) -> None:
        for x, y in points:
            self._marks[self._row(y), self._x.cell(x)] = mark

    def _row(self, y: float) -> int:
        """Row of characters of a value: the one that has its dot."""
        return self._y.cells - 1 - self._dot_height(self._y.share(y)) // _DOT_ROWS

    def _dot_height(self, share: float) -> int:
        return round(min(1.0, max(0.0, share)) * (self._y.cells * _DOT_ROWS - 1))

    def label_rows(self, series: Sequence[Series]) -> dict[int, str]:
        """Names by row: beside the end of each line, or as near as their order allows."""
        ordered = sorted(series, key=lambda one: -one.points[-1][1])[: self._y.cells]
        rows: list[int] = []
        for one in ordered:
            rows.append(max(self._row(one.points[-1][1]), rows[-1] + 1 if rows else 0))
        last = self._y.cells - len(rows)
        return {
            min(row, last + at): one.name
            for at, (row, one) in enumerate(zip(rows, ordered, strict=True))
        }

    def lines(
        self,
        label_columns: int,
        names: dict[int, str],
        format_x: Callable[[float], str],
        format_y: Callable[[float], str],
        x_title: str,
        y_title: str,
    ) -> list[str]:
        y = self._y
        y_ticks = {self._row(at): at for at in _ticks(y.low, y.high, y.cells, 2, _DECIMALS)}
        lines = [y_title]
        for row in range(y.cells):
            label = format_y(y_ticks[row]) if row in y_ticks else ""
            edge = "┤" if row in y_ticks else "│"
            cells = "".join(self._cell(row, column) for column in range(self._x.cells))
            name = names.get(row, "")[:_MAX_LABEL_COLUMNS]
            lines.append(f"{label:>{label_columns}} {edge}{cells} {name}".rstrip())
        return lines + self._x_lines(label_columns, format_x, x_title)

    def _cell(self, row: int, column: int) -> str:
        dots = self._dots[row][column]
        return self._marks.get((row, column)) or (chr(_BRAILLE + dots) if dots else " ")

    def _x_lines(self, margin: int, format_x: Callable[[float], str], title: str) -> list[str]:
        x = self._x
        ticks = [(x.cell(at), format_x(at)) for at in _ticks(x.low, x.high, x.cells, 6, _BINARIES)]
        rule, labels = ["─"] * x.cells, [" "] * (x.cells + 6)
        for at, text in ticks:
            rule[at] = "┴"
            begin = max(0, min(at - len(text) // 2, len(labels) - len(text)))
            labels[begin : begin + len(text)] = text
        lead = " " * (margin + 1)
        return [f"{lead}└{''.join(rule)}", f"{lead} {''.join(labels).rstrip()}", f"{lead} {title}"]


def _powers(base: float, steps: Sequence[float], low: float, high: float) -> list[float]:
    first = math.floor(math.log(low, base)) - 1
    last = math.ceil(math.log(high, base)) + 1
    values = [step * base**power for power in range(first, last + 1) for step in steps]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


# ways to choose ticks, the most first
_DECIMALS = ((10, (1, 2, 5)), (10, (1, 3)), (10, (1,)), (100, (1,)), (1000, (1,)))
_BINARIES = ((2, (1,)), (4, (1,)), (16, (1,)), (256, (1,)))


def _ticks(
    low: float,
    high: float,
    cells: int,
    cells_each: int,
    ways: Sequence[tuple[float, Sequence[float]]],
) -> list[float]:
    """Round values within an axis, as many as leave each `cells_each` characters."""
    for base, steps in ways:
        found = _powers(base, steps, low, high)
        if len(found) > 1 and len(found) * cells_each <= cells:
            return found
    return [low, high] if high > low else [low]
