"""The request table: sortable, keeps the cursor on its request, updates only changed cells."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import DataTable

from localgen.tui.top.request_rows import (
    REQUEST_COLUMNS,
    RequestColumn,
    RequestRow,
    sort_request_rows,
)

_ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class TextCell:
    """A cell that renders much faster than rich.text.Text, which searches for words and spans.

    The table draws hundreds of cells per key press. style: a rich style name, or empty.
    """

    text: str
    style: str = ""
    is_right_aligned: bool = False

    def fit_to_width(self, width: int) -> str:
        """The text padded or cut to exactly `width` columns."""
        missing = width - cell_len(self.text)
        if missing < 0:
            return set_cell_size(self.text, width - 1) + _ELLIPSIS if width else ""
        return " " * missing + self.text if self.is_right_aligned else self.text + " " * missing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        style = console.get_style(self.style) if self.style else None
        yield Segment(self.fit_to_width(options.max_width), style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = cell_len(self.text)
        return Measurement(width, width)


_MIN_MODEL_COLUMNS = 12
_MAX_MODEL_COLUMNS = 40
_UPDATE_PERIOD_S = 0.95


class RequestTable(DataTable[TextCell]):
    """The request table. The cursor follows its request when rows move."""

    class RequestSelected(Message):
        """Enter, or a click on the cursor's row."""

        def __init__(self, row: RequestRow) -> None:
            super().__init__()
            self.row = row

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Timeline"),
        Binding("j", "cursor_down", "Next", show=False),
        Binding("k", "cursor_up", "Previous", show=False),
        Binding("g", "scroll_top", "First", show=False),
        Binding("G", "scroll_bottom", "Last", show=False),
    ]

    def __init__(self, hidden_columns: frozenset[str] = frozenset()) -> None:
        super().__init__(cursor_type="row", zebra_stripes=False, id="requests")
        self._rows: dict[str, RequestRow] = {}
        self._shown_texts: dict[str, tuple[str, ...]] = {}
        self._last_update_s = 0.0
        self._shown_columns: tuple[RequestColumn, ...] = ()
        self.hidden_columns = hidden_columns  # by key
        self._sort_column, self._descending = REQUEST_COLUMNS[1], False

    @property
    def cursor_request(self) -> RequestRow | None:
        """The request under the cursor."""
        if not self.row_count or not self.is_valid_row_index(self.cursor_row):
            return None
        key = self.ordered_rows[self.cursor_row].key.value
        return self._rows.get(key or "")

    def show_requests(self, rows: list[RequestRow]) -> None:
        """Show these requests. Changes of figures alone are drawn once a second."""
        if not self._is_update_due(rows):
            return
        rows = sort_request_rows(rows, self._sort_column, descending=self._descending)
        self._rows = {row.id: row for row in rows}
        shown = {row.id: tuple(c.format_cell(row) for c in self._shown_columns) for row in rows}
        if list(shown) != list(self._shown_texts):
            self._rebuild(shown)
        else:
            self._update(shown)
        self._shown_texts = shown

    def _is_update_due(self, rows: list[RequestRow]) -> bool:
        """Return True if a redraw is due: a DataTable redraws all cells at each change."""
        before, now_s = self._rows, time.monotonic()
        if now_s < self._last_update_s + _UPDATE_PERIOD_S and len(self._shown_texts) == len(rows):
            states = {each.id: each.state for each in before.values()}
            if all(states.get(row.id) == row.state for row in rows):
                return False
        self._last_update_s = now_s
        return True

    def hide_columns(self, keys: frozenset[str]) -> None:
        """Hide these columns, and show all others that fit."""
        self.hidden_columns = keys
        self._make_columns()

    def sort_by(self, key: str) -> None:
        """Sort by a column, or reverse the order if it already is the sort column."""
        column = next(each for each in REQUEST_COLUMNS if each.key == key)
        if column is self._sort_column:
            self._descending = not self._descending
        else:
            # numbers start with the largest first
            self._sort_column, self._descending = column, column.is_numeric
        self._make_columns()

    def sort_by_next_column(self) -> None:
        """Sort by the column to the right of the current sort column."""
        shown = self._shown_columns or REQUEST_COLUMNS
        at = shown.index(self._sort_column) if self._sort_column in shown else -1
        self.sort_by(shown[(at + 1) % len(shown)].key)

    def reverse_sort(self) -> None:
        self.sort_by(self._sort_column.key)

    def on_resize(self, event: events.Resize) -> None:
        self._make_columns()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        event.stop()
        self.sort_by(str(event.column_key.value))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        row = self._rows.get(str(event.row_key.value))
        if row is not None:
            self.post_message(self.RequestSelected(row))

    def _make_columns(self) -> None:
        """Add the columns that fit the terminal."""
        room, screen = self.content_size.width, self.app.size.width
        columns = tuple(
            column
            for column in REQUEST_COLUMNS
            if column.min_terminal_columns <= screen and column.key not in self.hidden_columns
        )
        fixed = sum(column.width + 2 * self.cell_padding for column in columns)
        model = min(_MAX_MODEL_COLUMNS, max(_MIN_MODEL_COLUMNS, room - fixed - 1))
        self.clear(columns=True)
        for column in columns:
            self.add_column(self._title(column), key=column.key, width=column.width or model)
        self._shown_columns, self._shown_texts = columns, {}
        self.show_requests(list(self._rows.values()))

    def _title(self, column: RequestColumn) -> Text:
        arrow = ("↓" if self._descending else "↑") if column is self._sort_column else ""
        # unpadded, so that the arrow is not cut off
        title = f"{column.title}{arrow}"
        return Text(title, justify="right" if column.is_numeric else "left", no_wrap=True)

    def _rebuild(self, shown: dict[str, tuple[str, ...]]) -> None:
        under = self.cursor_request_id
        scroll = self.scroll_y
        self.clear()
        for key, texts in shown.items():
            self.add_row(*self._cells(key, texts), key=key)
        if under in shown:
            self.move_cursor(row=list(shown).index(under), scroll=False)
        self.scroll_y = min(scroll, self.max_scroll_y)

    @property
    def cursor_request_id(self) -> str:
        """Id of the request under the cursor; empty if there is none."""
        if not self.row_count or not self.is_valid_row_index(self.cursor_row):
            return ""
        return self.ordered_rows[self.cursor_row].key.value or ""

    def _update(self, shown: dict[str, tuple[str, ...]]) -> None:
        for key, texts in shown.items():
            if texts == self._shown_texts[key]:
                continue
            cells = self._cells(key, texts)
            pairs = zip(self._shown_columns, cells, self._shown_texts[key], texts, strict=True)
            for column, cell, before, now in pairs:
                if before != now:
                    self.update_cell(key, column.key, cell)

    def _cells(self, key: str, texts: tuple[str, ...]) -> list[TextCell]:
        style = "" if self._rows[key].is_live else "dim"
        return [
            TextCell(text, style, column.is_numeric)
            for column, text in zip(self._shown_columns, texts, strict=True)
        ]
