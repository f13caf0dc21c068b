"""Line charts with logarithmic axes: as text, readable without colours, and as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series with points, at least one. format_x, format_y: labels of the axes."""

    series: Sequence[Series]
    x_title: str
    y_title: str
    format_x: Callable[[float], str]
    format_y: Callable[[float], str]

    @property
    def lines(self) -> list[Series]:
        return [one for one in self.series if one.mark is None]

    def axes(self, columns: int, rows: int) -> tuple[_Axis, _Axis]:
        xs = [x for one in self.series for x, _ in one.points]
        ys = [y for one in self.series for _, y in one.points]
        return (
            _Axis(min(xs), max(xs), columns),
            _Axis(min(ys) / _Y_MARGIN, max(ys) * _Y_MARGIN, rows),
        )


def chart_text(chart: Chart, width: int, rows: int) -> list[str]:
    """Lines of text. width: columns of the whole chart; rows: of the plot alone."""
    names = max((len(one.name) for one in chart.lines), default=0)
    _, y = chart.axes(1, rows)
    y_labels = max(len(chart.format_y(at)) for at in y.y_ticks())
    columns = width - y_labels - min(_MAX_LABEL_COLUMNS, names) - 4
    plot = _Plot(*chart.axes(max(_MIN_PLOT_COLUMNS, columns), rows))
    for index, one in enumerate(chart.lines):
        plot.draw_line(one.points, _DASHES[index % len(_DASHES)])
    for one in chart.series:
        if one.mark is not None:
            plot.draw_marks(one.points, one.mark)
    return plot.lines(chart, y_labels)


# of the plot in pixels, and around it
_SVG_WIDTH, _SVG_HEIGHT, _SVG_LEFT, _SVG_RIGHT, _SVG_TOP, _SVG_BOTTOM = 640, 360, 90, 150, 40, 60
# distinct with each kind of colour vision (Okabe and Ito)
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def chart_svg(chart: Chart) -> str:
    """A document in SVG."""
    x_axis, y_axis = chart.axes(_SVG_WIDTH // 8, _SVG_HEIGHT // 20)

    def x(value: float) -> float:
        return round(_SVG_LEFT + x_axis.share(value) * _SVG_WIDTH, 1)

    def y(value: float) -> float:
        return round(_SVG_TOP + (1 - y_axis.share(value)) * _SVG_HEIGHT, 1)

    bottom, right = _SVG_TOP + _SVG_HEIGHT, _SVG_LEFT + _SVG_WIDTH
    width, height = right + _SVG_RIGHT, bottom + _SVG_BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _svg_text(_SVG_LEFT, _SVG_TOP - 16, chart.y_title, "start"),
        _svg_text(_SVG_LEFT, bottom + 46, chart.x_title, "start"),
    ]
    for at in y_axis.y_ticks():
        parts.append(f'<path d="M{_SVG_LEFT} {y(at)}H{right}" stroke="#ddd"/>')
        parts.append(_svg_text(_SVG_LEFT - 8, y(at) + 4, chart.format_y(at), "end"))
    for at in x_axis.x_ticks():
        parts.append(f'<path d="M{x(at)} {_SVG_TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(_svg_text(x(at), bottom + 20, chart.format_x(at), "middle"))
    for index, one in enumerate(chart.lines):
        color, dashes = _COLORS[index % len(_COLORS)], _DASHES[index % len(_DASHES)]
        points = " ".join(f"{x(at)},{y(value)}" for at, value in one.points)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2" '
            f'stroke-dasharray="{dashes[0]} {dashes[1]}"/>'
        )
        end_x, end_y = one.points[-1]
        parts.append(_svg_text(x(end_x) + 8, y(end_y) + 4, one.name, "start", color))
    for one in chart.series:
        if one.mark is not None:
            parts += [
                _svg_text(x(at), y(value) + 5, one.mark, "middle") for at, value in one.points
            ]
    return "\n".join([*parts, "</svg>", ""])


def _svg_text(x: float, y: float, text: str, anchor: str, color: str = "#222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


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

    def x_ticks(self) -> list[float]:
        return _ticks(self, 6, _BINARIES)

    def y_ticks(self) -> list[float]:
        return _ticks(self, 2, _DECIMALS)


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
        """Row -> name of a line: the row of its last point, or the nearest free one in order."""
        ordered = sorted(series, key=lambda one: -one.points[-1][1])[: self._y.cells]
        rows: list[int] = []
        for one in ordered:
            rows.append(max(self._row(one.points[-1][1]), rows[-1] + 1 if rows else 0))
        last = self._y.cells - len(rows)
        return {
            min(row, last + at): one.name
            for at, (row, one) in enumerate(zip(rows, ordered, strict=True))
        }

    def lines(self, chart: Chart, label_columns: int) -> list[str]:
        names = self.label_rows(chart.lines)
        y_ticks = {self._row(at): at for at in self._y.y_ticks()}
        lines = [chart.y_title]
        for row in range(self._y.cells):
            label = chart.format_y(y_ticks[row]) if row in y_ticks else ""
            edge = "┤" if row in y_ticks else "│"
            cells = "".join(self._cell(row, column) for column in range(self._x.cells))
            name = names.get(row, "")[:_MAX_LABEL_COLUMNS]
            lines.append(f"{label:>{label_columns}} {edge}{cells} {name}".rstrip())
        return lines + self._x_lines(label_columns, chart)

    def _cell(self, row: int, column: int) -> str:
        dots = self._dots[row][column]
        return self._marks.get((row, column)) or (chr(_BRAILLE + dots) if dots else " ")

    def _x_lines(self, margin: int, chart: Chart) -> list[str]:
        x = self._x
        ticks = [(x.cell(at), chart.format_x(at)) for at in x.x_ticks()]
        rule, labels = ["─"] * x.cells, [" "] * (x.cells + 6)
        for at, text in ticks:
            rule[at] = "┴"
            begin = max(0, min(at - len(text) // 2, len(labels) - len(text)))
            labels[begin : begin + len(text)] = text
        lead = " " * (margin + 1)
        return [
            f"{lead}└{''.join(rule)}",
            f"{lead} {''.join(labels).rstrip()}",
            f"{lead} {chart.x_title}",
        ]


def _powers(base: float, steps: Sequence[float], low: float, high: float) -> list[float]:
    first = math.floor(math.log(low, base)) - 1
    last = math.ceil(math.log(high, base)) + 1
    values = [step * base**power for power in range(first, last + 1) for step in steps]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


# ways to choose ticks, the most first
_DECIMALS = ((10, (1, 2, 5)), (10, (1, 3)), (10, (1,)), (100, (1,)), (1000, (1,)))
_BINARIES = ((2, (1,)), (4, (1,)), (16, (1,)), (256, (1,)))


def _ticks(
    axis: _Axis, cells_each: int, ways: Sequence[tuple[float, Sequence[float]]]
) -> list[float]:
    """Round values within an axis, as many as leave each `cells_each` characters."""
    for base, steps in ways:
        found = _powers(base, steps, axis.low, axis.high)
        if len(found) > 1 and len(found) * cells_each <= axis.cells:
            return found
    return [axis.low, axis.high] if axis.high > axis.low else [axis.low]
