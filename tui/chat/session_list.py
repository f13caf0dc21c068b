"""The session list, a tree of forks: name and age of each, or what it is doing."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from localgen.backends.terminal_text import escape_name
from localgen.tui.chat.active_session import UNNAMED_SESSION
from localgen.tui.gauges.plots import plot
from localgen.tui.widgets.alignment import align_ends

# mouse links at the bottom of the list
_ACTION_LINKS = " ".join(
    f"[@click=request('{act}')][u]{act}[/][/]" for act in ("rename", "fork", "delete")
)
_PLOT_COLUMNS = 5
# columns of what is left of a long name
_MIN_NAME = 8
_MAX_INDENTS = 3
# between two repaints for the speed of answers: a list is drawn as a whole
_ACTIVITY_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as listed. age: since the last change, or empty.

    activity: what it is doing, or empty if idle; rates: tokens/s lately, if it is answering.
    depth: in the tree of forks.
    """

    id: int
    name: str
    age: str = ""
    activity: str = ""
    rates: tuple[float, ...] = ()
    depth: int = 0


class SessionList(OptionList):
    """Lists sessions. Posts ActionRequested for the session under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select", "Open the session", show=False),
        Binding("j", "cursor_down", "Next", show=False),
        Binding("k", "cursor_up", "Previous", show=False),
        Binding("g", "first", "First", show=False),
        Binding("G", "last", "Last", show=False),
        Binding("r", "request('rename')", "Rename", show=False),
        Binding("f", "request('fork')", "Fork", show=False),
        Binding("delete,d", "request('delete')", "Delete", show=False),
    ]
    DEFAULT_CSS = """
    SessionList {
        width: 28; height: 1fr; border: round $border; padding: 0; background: $background;
        border-title-color: $primary; border-title-style: bold; scrollbar-size-vertical: 1;
        scrollbar-gutter: stable; border-subtitle-color: $text-muted;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    SessionList > .option-list--option { padding: 0; }
    SessionList:focus { border: round $primary; }
    """

    FOCUS_ON_CLICK = False  # keeps the focus in the prompt

    class ActionRequested(Message):
        """action: open, rename, fork or delete."""

        def __init__(self, action: str, session_id: int) -> None:
            super().__init__()
            self.action = action
            self.session_id = session_id

    def __init__(self) -> None:
        super().__init__(id="sessions", markup=False)
        self.border_title = "Sessions"
        self.border_subtitle = _ACTION_LINKS
        self._rows: list[SessionRow] = []
        self._current = 0
        self._next_activity_s = 0.0

    def show_sessions(self, rows: list[SessionRow], current: int) -> None:
        """Show these sessions. current: id of the session on the screen."""
        if (rows, current) == (self._rows, self._current):
            return
        now_s = time.monotonic()
        is_early = now_s < self._next_activity_s and _differ_in_speed_only(rows, self._rows)
        if is_early and current == self._current:
            return
        self._next_activity_s = now_s + _ACTIVITY_PERIOD_S
        before, previous, under = self._rows, self._current, self._cursor_session_id()
        self._rows, self._current = rows, current
        if len(rows) != len(before):  # setting it draws the list anew
            self.border_title = f"Sessions {len(rows):,}" if len(rows) > 9 else "Sessions"
        if [row.id for row in rows] == [row.id for row in before]:
            for row, old in zip(rows, before, strict=True):
                if row != old or (row.id in (previous, current) and current != previous):
                    self._draw_row(row)
        else:
            self.clear_options()
            self.add_options([Option(self._row_content(row), id=str(row.id)) for row in rows])
        wanted = current if current != previous or under is None else under
        if not self.has_focus:
            wanted = current
        at = next((at for at, row in enumerate(rows) if row.id == wanted), None)
        self.highlighted = at

    def on_resize(self, event: events.Resize) -> None:
        """Draw the rows for the new width."""
        for row in self._rows:
            self._draw_row(row)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option.id is not None:
            self.post_message(self.ActionRequested("open", int(event.option.id)))

    def action_request(self, action: str) -> None:
        """Request an action for the session under the cursor."""
        session = self._cursor_session_id()
        if session is not None:
            self.post_message(self.ActionRequested(action, session))

    def _cursor_session_id(self) -> int | None:
        at = self.highlighted
        return self._rows[at].id if at is not None and at < len(self._rows) else None

    def _draw_row(self, row: SessionRow) -> None:
        self.replace_option_prompt(str(row.id), self._row_content(row))

    def _row_content(self, row: SessionRow) -> Content:
        width = max(_MIN_NAME, self.scrollable_content_region.width or 25)
        is_current = row.id == self._current
        state = _activity_content(row) if row.activity else Content.styled(row.age, "$muted")
        state = state.truncate(width - 2 - _MIN_NAME, ellipsis=True)
        # a deep tree must leave room for names
        branch = "  " * (min(row.depth, _MAX_INDENTS) - 1) + "└ " if row.depth else ""
        name = Content.assemble(
            (branch, "$muted"),
            (escape_name(row.name) or UNNAMED_SESSION, "bold" if is_current else ""),
        ).truncate(width - 2 - state.cell_length, ellipsis=True)
        mark = Content.styled("▌" if is_current else " ", "$primary")
        return align_ends(Content.assemble(mark, name), state, width)


def _differ_in_speed_only(rows: list[SessionRow], before: list[SessionRow]) -> bool:
    """True if the same sessions answer as before."""
    return len(rows) == len(before) and all(
        row == old
        or (
            replace(row, activity="", rates=()) == replace(old, activity="", rates=())
            and bool(row.rates)
            and bool(old.rates)
        )
        for row, old in zip(rows, before, strict=True)
    )


def _activity_content(row: SessionRow) -> Content:
    """The speed as a small plot and a number, or what else the session does."""
    (line,) = plot(row.rates, _PLOT_COLUMNS, 1, min_points=1) if row.rates else ("",)
    return Content.styled(f"{line} {row.activity}".strip(), "$success")
