"""A cell of a table: a line of text that is cut or padded, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

_CUT = "…"


@dataclass(frozen=True, slots=True)
class Cell:
    """Renders in a fraction of what rich.text.Text takes, which looks for words and spans: a table
    draws hundreds of them for a key. style: as rich names it; empty: none."""

    text: str
    style: str = ""
    is_right: bool = False

    def fitted(self, width: int) -> str:
        """In exactly so many columns."""
        missing = width - cell_len(self.text)
        if missing < 0:
            return set_cell_size(self.text, width - 1) + _CUT if width else ""
        return " " * missing + self.text if self.is_right else self.text + " " * missing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        style = console.get_style(self.style) if self.style else None
        yield Segment(self.fitted(options.max_width), style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = cell_len(self.text)
        return Measurement(width, width)
