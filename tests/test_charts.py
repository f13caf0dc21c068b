"""Charts as text: lines, marks, ticks, labels."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localgen.charts import Chart, Series, chart_svg, chart_text


def chart_of(series: list[Series]) -> Chart:
    return Chart(
        series=series,
        x_title="requests",
        y_title="tokens/s",
        format_x=lambda x: f"{x:g}",
        format_y=lambda y: f"{y:g}",
    )


def chart(series: list[Series], width: int = 60, rows: int = 10) -> list[str]:
    return chart_text(chart_of(series), width, rows)


def dots(line: str) -> int:
    return sum(bin(ord(each) - 0x2800).count("1") for each in line if 0x2800 <= ord(each) < 0x2900)


def test_a_straight_line_is_one() -> None:
    lines = chart([Series("linear", [(1, 10), (100, 1000)])])
    assert lines[0] == "tokens/s"
    plot = lines[1:11]
    first = [next(at for at, each in enumerate(line) if ord(each) >= 0x2800) for line in plot]
    assert first == sorted(first, reverse=True)
    steps = [before - after for before, after in pairwise(first[1:-1])]
    assert max(steps) - min(steps) <= 1
    assert plot[0].endswith(" linear")
    labels = [line.split("┤")[0].strip() for line in lines if "┤" in line]
    assert labels == ["1000", "300", "100", "30", "10"]
    assert lines[-2].split() == ["1", "2", "4", "8", "16", "32", "64"]
    assert lines[-1].strip() == "requests"


def test_a_point_between_is_on_the_line() -> None:
    line = Series("line", [(1, 1), (4, 16), (16, 16)])
    marked = chart([line, Series("marks", [(2, 4), (8, 16)], "●")])
    alone = chart([line])
    for row, (with_mark, without) in enumerate(zip(marked, alone, strict=True)):
        for column, each in enumerate(with_mark):
            if each == "●":
                near = [
                    alone[y][x]
                    for y in range(max(0, row - 1), row + 2)
                    for x in range(max(0, column - 1), column + 2)
                    if x < len(alone[y])
                ]
                assert any(ord(one) >= 0x2800 for one in near), (row, column, without)
    assert "".join(marked).count("●") == 2


def test_lines_are_told_apart_and_labelled() -> None:
    flat = [[(1.0, y), (100.0, y)] for y in (10.0, 20.0, 40.0)]
    lines = chart([Series(f"line {at}", points) for at, points in enumerate(flat)])
    drawn = {at: line for line in lines for at in range(3) if line.endswith(f" line {at}")}
    assert len({dots(line) for line in drawn.values()}) == 3
    assert dots(drawn[0]) > dots(drawn[1]) > dots(drawn[2])


def test_lines_that_end_together_have_labels_in_rows_of_their_own() -> None:
    same = [Series(f"line {at}", [(1, 10), (100, 50)]) for at in range(3)]
    labelled = [line.rpartition("line ")[2] for line in chart(same) if "line " in line]
    assert sorted(labelled) == ["0", "1", "2"]


def test_svg() -> None:
    fast = Series("fast & <new>", [(1, 10), (10, 100), (100, 1000)])
    slow = Series("slow", [(1, 10), (100, 20)])
    marks = Series("marks", [(10, 100)], "◆")
    root = ElementTree.fromstring(chart_svg(chart_of([fast, slow, marks])))
    name = "{http://www.w3.org/2000/svg}"
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
        for line in root.iter(f"{name}polyline")
    ]
    (left, bottom), (middle, height), (right, top) = lines[0]
    assert middle == (left + right) / 2
    assert height == pytest.approx((bottom + top) / 2, abs=0.1)
    assert lines[1][0] == lines[0][0]
    texts = {text.text: text for text in root.iter(f"{name}text")}
    assert {"fast & <new>", "slow", "◆", "requests", "tokens/s", "1", "64", "1000"} <= texts.keys()
    mark = texts["◆"]
    assert float(mark.get("x", "")) == middle
    assert float(mark.get("y", "")) - 5 == pytest.approx(height)
    colors = {line.get("stroke") for line in root.iter(f"{name}polyline")}
    assert len(colors) == 2


POINTS = st.lists(
    st.tuples(st.floats(1e-3, 1e6), st.floats(1e-6, 1e12)), min_size=1, max_size=6
).map(sorted)


@given(st.lists(POINTS, min_size=1, max_size=4), st.integers(1, 150), st.integers(2, 30))
def test_any_points_fill_a_chart_of_that_size(
    series: list[list[tuple[float, float]]], width: int, rows: int
) -> None:
    lines = chart([Series(f"s{at}", points) for at, points in enumerate(series)], width, rows)
    assert len(lines) == rows + 4
    # the plot keeps 20 columns, however narrow the terminal is
    assert max(map(len, lines)) <= max(width, 20 + 4 + 20) + 6
