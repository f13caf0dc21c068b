"""The session list, most recent first: name, model and activity of each session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from localgen.backends import units
from localgen.backends.terminal_text import escape_name
from localgen.tui.chat.active_session import UNNAMED_SESSION

# mouse links at the bottom of the list
_ACTION_LINKS = " ".join(
    f"[@click=request('{act}')][u]{act}[/][/]" for act in ("rename", "fork", "delete")
)


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as listed. activity: what it is doing, or empty if idle."""

    id: int
    name: str
    model: str
    num_turns: int
    activity: str = ""


class SessionList(OptionList):
    """Lists sessions. Posts ActionRequested for the session under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select", "Open the session", show=False),
        Binding("r", "request('rename')", "Rename", show=False),
        Binding("f", "request('fork')", "Fork", show=False),
        Binding("delete,d", "request('delete')", "Delete", show=False),
    ]
    DEFAULT_CSS = """
    SessionList {
        width: 28; height: 1fr; border: round $border; padding: 0; background: $background;
        border-title-color: $primary; border-title-style: bold; scrollbar-size-vertical: 1;
        border-subtitle-color: $text-muted;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
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

    def show_sessions(self, rows: list[SessionRow], current: int) -> None:
        """Show these sessions. current: id of the session on the screen."""
        if (rows, current) == (self._rows, self._current):
            return
        same_ids = [row.id for row in rows] == [row.id for row in self._rows]
        moved = current != self._current
        under = self._cursor_session_id()
        self._rows, self._current = rows, current
        self.border_title = f"Sessions {len(rows):,}" if len(rows) > 9 else "Sessions"
        if same_ids:
            for row in rows:
                self.replace_option_prompt(str(row.id), self._row_content(row))
        else:
            self.clear_options()
            self.add_options([Option(self._row_content(row), id=str(row.id)) for row in rows])
        wanted = current if moved or under is None else under
        if not self.has_focus:
            wanted = current
        at = next((at for at, row in enumerate(rows) if row.id == wanted), None)
        self.highlighted = at

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

    def _row_content(self, row: SessionRow) -> Content:
        mark = "▌" if row.id == self._current else " "
        about = [
            escape_name(row.model),
            *([units.format_count(row.num_turns, "turn")] if row.num_turns else []),
        ]
        second = (f"▸ {row.activity}", "$success") if row.activity else (" · ".join(about), "dim")
        name = escape_name(row.name) or UNNAMED_SESSION
        return Content.assemble(
            (mark, "$primary"), (name, "bold" if row.id == self._current else ""), "\n",
            (mark, "$primary"), second,
        )  # fmt: skip
