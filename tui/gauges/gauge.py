"""What every gauge is: a frame, a reading, and lines that are drawn of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localgen.tui.gauges.drawing import plot
from localgen.tui.gauges.readings import History

# half seconds: a minute
_SAMPLES = 120
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
        self.border_title = title
        self._drawn = ""

    def watch_reading(self) -> None:
        """Repaint if it looks otherwise: painting takes longer than finding out."""
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

    def lines(self, reading: _Reading, width: int, height: int) -> Sequence[Content]:
        """The reading in so many columns and rows; plots take the rows that are left."""
        return ()


def history(values: History, width: int, rows: int, style: str) -> list[Content]:
    """A plot of the last minute, or of more where it is wide."""
    if rows < 1:
        return []
    return [Content.styled(line, style) for line in plot(values, width, rows, samples=_SAMPLES)]
