"""A dialog to choose from a list that is filtered by typing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, TypeVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from localgen.backends.terminal_text import escape_name, one_line
from localgen.tui.widgets.dialog import Dialog

_Item = TypeVar("_Item")


class Picker(Dialog[_Item | None]):
    """Base of dialogs with an Input, which keeps the focus, above an OptionList of the matches."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close"),
        Binding("down", "move(1)", "Next", show=False),
        Binding("up", "move(-1)", "Previous", show=False),
    ]
    DEFAULT_CSS = """
    Picker > Vertical {
        width: 90%; height: 80%; padding: 0 1;
        border: round $primary; background: $surface; border-title-color: $primary;
    }
    Picker Input { margin: 0 0 1 0; }
    Picker OptionList { height: 1fr; border: none; background: $surface; padding: 0; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._items: list[_Item] = []

    @property
    def highlighted(self) -> _Item | None:
        """The item of the highlighted row."""
        at = self.query_one(OptionList).highlighted
        return None if at is None else self._items[at]

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.select_item(self._items[event.option_index])

    def action_move(self, by: int) -> None:
        """Highlight the row below (1) or above (-1)."""
        found = self.query_one(OptionList)
        if by > 0:
            found.action_cursor_down()
        else:
            found.action_cursor_up()

    def select_item(self, item: _Item) -> None:
        """Called when a row is chosen: closes with its item."""
        self.dismiss(item)

    def show_rows(
        self,
        rows: Iterable[tuple[_Item, Content]],
        current: _Item | None = None,
        empty_text: str = "",
    ) -> None:
        """List these items, each with its rendered row; highlights current, else the first.

        empty_text: shown if there are none.
        """
        listed = list(rows)
        self._items = [chosen for chosen, _ in listed]
        found = self.query_one(OptionList)
        found.clear_options()
        found.add_options([Option(drawn) for _, drawn in listed])
        if empty_text and not listed:
            found.add_option(Option(Content.styled(empty_text, "dim"), disabled=True))
        at = self._items.index(current) if current in self._items else 0
        found.highlighted = at if listed else None


def matches_query(text: str, query: str) -> bool:
    """Return True if text contains every word of query, ignoring case."""
    return all(word in text.casefold() for word in query.casefold().split())


def name_row(name: str, description: str, *, is_current: bool, style: str = "bold") -> Content:
    """A picker row: name and description, with a mark if it is the current one."""
    mark = "● " if is_current else "  "
    return Content.assemble(mark, (escape_name(name), style), (f"  {one_line(description)}", "dim"))
