"""Rows at the end of a terminal that are redrawn, below output that stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType, Segment, Segments

Row = list[Segment]


class LiveRows:
    """The rows below the printed output of a console, between start() and stop().

    All output goes through draw() meanwhile. Rows are never drawn on a console that cannot move the
    cursor.

    At a resize terminals wrap rows again, and some (tmux) scroll rows out that were at the top of
    a screen with room at its end. What has scrolled out cannot be erased, so such rows have to
    last: let_last().
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._can_redraw = console.is_terminal and not console.is_dumb_terminal
        self._columns = console.width
        self._live: list[Row] = []  # on the screen, like those below them
        self._below: list[Row] = []

    def start(self) -> None:
        self._console.show_cursor(False)

    def stop(self) -> None:
        """Remove the rows from the screen."""
        self.draw([])
        self._console.show_cursor(True)

    def is_resized(self) -> bool:
        """Whether the console has another width than at the last call."""
        columns, self._columns = self._columns, self._console.width
        return columns != self._columns

    @property
    def live(self) -> Sequence[Row]:
        """The live rows on the screen."""
        return self._live

    def let_last(self, num_rows: int) -> None:
        """Leave the first live rows where they are."""
        self._live = self._live[num_rows:]

    def draw(
        self, lasting: Iterable[Row], live: Sequence[Row] = (), below: Sequence[Row] = ()
    ) -> None:
        """Print `lasting` above and replace the live rows by `live` and `below`, in one write."""
        with self._console:
            self._erase()
            self._console.print(join_rows(lasting), end="")
            if self._can_redraw:
                self._console.print(join_rows((*live, *below)), end="")
                self._live, self._below = list(live), list(below)

    def _erase(self) -> None:
        widths = (Segment.get_line_length(row) for row in (*self._live, *self._below))
        rows = rows_on_screen(widths, self._console.width)
        self._live, self._below = [], []
        one_up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
        if rows:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, *one_up * rows))


def rows_on_screen(widths: Iterable[int], columns: int) -> int:
    """Rows that lines of these widths take in a terminal, which wraps them again at a resize."""
    return sum(max(1, -(-width // columns)) for width in widths)


def join_rows(rows: Iterable[Row]) -> Segments:
    """The rows as one renderable, each with a newline."""
    return Segments([segment for row in rows for segment in (*row, Segment.line())])
