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
    a screen with room at its end. What has scrolled out cannot be erased: take_resized() makes such
    rows lasting.
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

    def take_resized(self, *, is_cut: bool) -> list[Row]:
        """After a resize, let the live rows last, without the last one, and return them.

        is_cut: rows above them are not on the screen yet, so none can last.
        """
        columns, self._columns = self._columns, self._console.width
        if columns == self._columns or is_cut:
            return []
        kept, self._live = self._live[:-1], self._live[-1:]
        return kept

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


def counted_text(rows: Iterable[Row]) -> str:
    """What rows have at any width, and before and after most markup is complete: no spaces, no
    borders of tables, no marks of Markdown."""
    return "".join(filter(_is_counted, "".join(segment.text for row in rows for segment in row)))


def drop_characters(rows: Sequence[Row], count: int) -> list[Row]:
    """The rows without the first `count` characters of counted_text()."""
    for index, row in enumerate(rows):
        if not count:
            return list(rows[index:])
        here = len(counted_text([row]))
        if here > count:
            return [_drop_from_row(row, count), *rows[index + 1 :]]
        count -= here
    return []


def _drop_from_row(row: Row, count: int) -> Row:
    """The end of a row that has more than `count` counted characters."""
    for index, segment in enumerate(row):
        here = len(counted_text([[segment]]))
        if here > count:
            text = segment.text
            while count:
                count -= _is_counted(text[0])
                text = text[1:]
            return [Segment(text.lstrip(), segment.style), *row[index + 1 :]]
        count -= here
    return []


def _is_counted(character: str) -> bool:
    return not (character.isspace() or character in "*_`#|~" or "\u2500" <= character <= "\u257f")
