"""What every gauge is: a frame, a reading, and lines that are drawn of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localgen.tui.gauges.plots import highest, plot
from localgen.tui.gauges.samples import History

# half seconds: a minute
_SAMPLES = 120
_SCALE = 7
_Reading = TypeVar("_Reading")


class Gauge(Widget, Generic[_Reading]):
    """Draws its reading, anew only when it is another one."""

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    Gauge {
        border: round $border; border-title-color: $primary; border-title-style: bold;
        border-subtitle-color: $muted; padding: 0 1; height: auto; min-height: 3;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    """
    reading: reactive[_Reading | None] = reactive(None, repaint=False)

    def __init__(self, title: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = self._title = title
        self._framed = ("", "")
        self._drawn = ""

    def watch_reading(self) -> None:
        """Repaint if it looks otherwise: painting takes longer than finding out."""
        if self.reading is not None and (frame := self.frame(self.reading)) != self._framed:
            self._framed = frame
            of, foot = frame
            title = Content.assemble(self._title, (f" of {of}" if of else "", "not bold $muted"))
            self.border_title, self.border_subtitle = title, Content(foot)
        if self._drawing().plain != self._drawn:
            self.refresh()

    def render(self) -> Content:
        """As many lines as there is room for."""
        drawing = self._drawing()
        self._drawn = drawing.plain
        return drawing

    def _drawing(self) -> Content:
        width, height = self.content_size
        if self.reading is None or not width * height:  # not laid out yet
            return Content("")
        lines = self.lines(self.reading, width, height)
        return Content("\n").join(lines[:height])

    def frame(self, reading: _Reading) -> tuple[str, str]:
        """What the reading is of, and what stands at the foot of the frame; inert."""
        return "", ""

    def lines(self, reading: _Reading, width: int, height: int) -> Sequence[Content]:
        """The reading in so many columns and rows; plots take the rows that are left."""
        return ()


def history(
    values: History, width: int, rows: int, style: str, text: Callable[[float], str]
) -> list[Content]:
    """A plot of the last minute, or of more where it is wide.

    text: of a value. At the left of the plot stands what its top is, and its bottom, zero.
    """
    if rows < 1:
        return []
    room = max(1, width - _SCALE - 1)
    most = highest(values, room, samples=_SAMPLES)
    scale = [""] * rows
    if most is not None:
        scale[-1] = "0"
        if most:
            scale[0] = text(most)
    plotted = plot(values, room, rows, samples=_SAMPLES)
    return [
        Content.assemble((f"{mark:>{_SCALE}} ", "$muted"), (line, style))
        for mark, line in zip(scale, plotted, strict=True)
    ]
