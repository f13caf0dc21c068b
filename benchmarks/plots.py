"""Compare the CPU time of redrawing a gauge's plot with that of plotting libraries.

pip install textual-plotext textual-plot, then python -m benchmarks.plots
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from typing import Any

from textual.app import App, ComposeResult
from textual.widgets import Sparkline, Static

from benchmarks.measure import RESULTS, ModelLine, Report
from localgen.tui.gauges.plots import plot

WIDTH, ROWS, SAMPLES, REDRAWS, ROUNDS = 60, 8, 120, 20, 5
Values = list[float]
Redraw = Callable[[Any, Values], object]


def _own(widget: Any, values: Values) -> None:
    widget.update("\n".join(plot(values, WIDTH, ROWS, min_points=SAMPLES)))


def _sparkline(widget: Any, values: Values) -> None:
    widget.data = values


def _plotext(widget: Any, values: Values) -> None:
    widget.plt.clear_figure()
    widget.plt.bar(list(range(WIDTH)), values[:WIDTH], width=1)
    widget.refresh()


def _textual_plot(widget: Any, values: Values) -> None:
    modes = import_module("textual_plot").HiResMode
    widget.clear()
    widget.plot(list(range(len(values))), values, hires_mode=modes.BRAILLE)


def _sides() -> dict[str, tuple[Callable[[], Any], Redraw]]:
    return {
        "localgen": (Static, _own),
        f"textual {version('textual')} Sparkline": (Sparkline, _sparkline),
        f"textual-plotext {version('textual-plotext')}": (
            lambda: import_module("textual_plotext").PlotextPlot(),
            _plotext,
        ),
        f"textual-plot {version('textual-plot')}": (
            lambda: import_module("textual_plot").PlotWidget(),
            _textual_plot,
        ),
    }


class _Frame(App[None]):
    """A screen filled by one plot."""

    def __init__(self, widget: Any) -> None:
        super().__init__()
        self._widget = widget

    def compose(self) -> ComposeResult:
        self._widget.styles.width, self._widget.styles.height = WIDTH, ROWS
        yield self._widget


async def _redraw_ms(widget: Any, redraw: Redraw) -> float:
    """CPU time of a redraw in ms, minus that of an idle screen."""
    async with _Frame(widget).run_test(size=(WIDTH, ROWS)) as pilot:

        async def took_s(action: Callable[[], object]) -> float:
            started_s = time.process_time()
            for _ in range(REDRAWS):
                action()
                await pilot.pause()
            return time.process_time() - started_s

        def new() -> None:
            redraw(widget, [random.random() for _ in range(SAMPLES)])

        new()
        await pilot.pause()
        return (await took_s(new) - await took_s(lambda: None)) / REDRAWS * 1e3


def main() -> int:
    """Run the benchmark. Returns 1 if the libraries are not installed."""
    try:
        sides = _sides()
    except ImportError as error:
        print(f"error: {error}: pip install textual-plotext textual-plot", file=sys.stderr)
        return 1
    report = Report(ModelLine("", 0, 0), ROUNDS, False, 0, {})
    report.commands.append("python -m benchmarks.plots")
    for name, (make, redraw) in sides.items():
        found = [asyncio.run(_redraw_ms(make(), redraw)) for _ in range(ROUNDS)]
        report.add(f"{WIDTH}×{ROWS}, {SAMPLES} samples", name, "ms of CPU a redraw", found)
    print(report.text())
    report.write(RESULTS / f"plots-{datetime.now(UTC):%Y%m%d}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
