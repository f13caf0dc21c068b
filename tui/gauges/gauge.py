"""Base class of all gauges: a frame around lines drawn from a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localgen.tui.gauges.plots import plot, plot_maximum
from localgen.tui.gauges.samples import TimeSeries

# points of a plot by the name of its time span, at one point per half second
DEFAULT_SPAN = "1 min"
TIME_SPANS = {DEFAULT_SPAN: 120, "5 min": 600, "15 min": 1800}
_SCALE_COLUMNS = 7
_Sample = TypeVar("_Sample")


class Gauge(Widget, Generic[_Sample]):
    """Draws its sample; repaints only when the drawn text changes."""

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    Gauge {
        border: round $border; border-title-color: $primary; border-title-style: bold;
        border-subtitle-color: $muted; padding: 0 1; height: auto; min-height: 3;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    """
    sample: reactive[_Sample | None] = reactive(None, repaint=False)
    # of the plots, a key of TIME_SPANS
    time_span: reactive[str] = reactive(DEFAULT_SPAN)

    def __init__(self, title: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = self._title = title
        self._border_texts = ("", "")
        self._drawn_text = ""

    def watch_sample(self) -> None:
        """Repaint if the drawn text has changed: comparing is cheaper than painting."""
        if (
            self.sample is not None
            and (frame := self.border_texts(self.sample)) != self._border_texts
        ):
            self._border_texts = frame
            suffix, foot = frame
            title = Content.assemble(
                self._title, (f" {suffix}" if suffix else "", "not bold $muted")
            )
            self.border_title, self.border_subtitle = title, Content(foot)
        if self._draw().plain != self._drawn_text:
            self.refresh()

    def render(self) -> Content:
        """The lines that fit into the widget."""
        drawing = self._draw()
        self._drawn_text = drawing.plain
        return drawing

    def _draw(self) -> Content:
        width, height = self.content_size
        if self.sample is None or not width * height:  # not laid out yet
            return Content("")
        lines = self.lines(self.sample, width, height)
        return Content("\n").join(lines[:height])

    def border_texts(self, sample: _Sample) -> tuple[str, str]:
        """What follows the title, and the text in the bottom border; control characters escaped."""
        return "", ""

    def lines(self, sample: _Sample, width: int, height: int) -> Sequence[Content]:
        """Draw the sample in `width` columns and `height` rows; plots fill the remaining rows."""
        return ()

    def series_plot(
        self,
        values: TimeSeries,
        width: int,
        rows: int,
        style: str,
        format_value: Callable[[float], str],
        *,
        dots: bool = False,
    ) -> list[Content]:
        """A plot of a time span up to now, or of more if it is wide enough.

        format_value: formats the maximum, which labels the top of the scale; the bottom is 0. dots:
        for values that are measured now and then.
        """
        if rows < 1:
            return []
        room, points = max(1, width - _SCALE_COLUMNS - 1), TIME_SPANS[self.time_span]
        most = plot_maximum(values, room, min_points=points)
        scale = [""] * rows
        if most is not None:
            scale[-1] = "0"
            if most:
                scale[0] = format_value(most)
        plotted = plot(values, room, rows, min_points=points, dots=dots)
        return [
            Content.assemble((f"{mark:>{_SCALE_COLUMNS}} ", "$muted"), (line, style))
            for mark, line in zip(scale, plotted, strict=True)
        ]
