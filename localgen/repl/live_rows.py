"""Rows at the end of a terminal that are redrawn, below output that stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.segment import Segment, Segments

Row = list[Segment]

# cursor up, erase the row
_ROW_UP = "\x1b[1A\x1b[2K"


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
        self._size = console.size
        self._live: list[Row] = []  # on the screen, like those below them
        self._below: list[Row] = []

    def start(self) -> None:
        self._console.show_cursor(False)

    def stop(self) -> None:
        """Remove the rows from the screen."""
        while not self.draw([]):
            self.is_resized()
        self._console.show_cursor(True)

    def is_resized(self) -> bool:
        """True if the size of the console has changed since the last call."""
        size, self._size = self._size, self._console.size
        return size != self._size

    @property
    def live(self) -> Sequence[Row]:
        """The live rows on the screen."""
        return self._live

    def let_last(self, num_rows: int) -> None:
        """Leave the first live rows where they are."""
        self._live = self._live[num_rows:]

    def draw(
        self, lasting: Iterable[Row], live: Sequence[Row] = (), below: Sequence[Row] = ()
    ) -> bool:
        """Print `lasting` above and replace the live rows by `live` and `below`, in one write.

        Returns False, and writes nothing, if the console was resized since is_resized().
        """
        if not self._can_redraw:
            live = below = ()
        with self._console.capture() as rendered:
            self._console.print(join_rows((*lasting, *live, *below)), end="")
        widths = (Segment.get_line_length(row) for row in (*self._live, *self._below))
        num_rows = rows_on_screen(widths, self._size.width)
        output = "\r" * bool(num_rows) + _ROW_UP * num_rows + rendered.get()
        if self._can_redraw and self._console.size != self._size:
            return False
        self._live, self._below = list(live), list(below)
        self._console.file.write(output)
        self._console.file.flush()
        return True


def rows_on_screen(widths: Iterable[int], columns: int) -> int:
    """Rows that lines of these widths take in a terminal, which wraps them again at a resize."""
    return sum(max(1, -(-width // columns)) for width in widths)


def join_rows(rows: Iterable[Row]) -> Segments:
    """The rows as one renderable, each with a newline."""
    return Segments([segment for row in rows for segment in (*row, Segment.line())])
