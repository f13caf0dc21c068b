"""The dialog in which the columns of the request table are chosen."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import SelectionList
from textual.widgets.selection_list import Selection

from localgen.tui.top.request_rows import REQUEST_COLUMNS
from localgen.tui.widgets.dialog import Dialog


class ColumnChoice(Dialog[frozenset[str] | None]):
    """Closes with the keys of the columns that are hidden, or None. hidden: those so far."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Cancel"),
        Binding("enter", "choose", "Show these", priority=True),
    ]
    DEFAULT_CSS = """
    ColumnChoice > Vertical {
        width: 40; height: auto; max-height: 90%; padding: 0 1; border: round $primary;
        background: $surface; border-title-color: $primary; border-subtitle-color: $text-muted;
    }
    ColumnChoice SelectionList, ColumnChoice SelectionList:focus {
        height: auto; border: none; padding: 0; background: $surface;
    }
    """

    def __init__(self, hidden: Collection[str]) -> None:
        super().__init__()
        self._hidden = hidden

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Columns"
            box.border_subtitle = "Space: hide or show, Enter: done"
            yield SelectionList(
                *(
                    Selection(
                        _label(column.title, is_shown=column.key not in self._hidden),
                        column.key,
                        column.key not in self._hidden,
                    )
                    for column in REQUEST_COLUMNS[1:]
                )
            )

    def on_selection_list_selection_toggled(
        self, event: SelectionList.SelectionToggled[str]
    ) -> None:
        """Say it in words: the mark differs in its colour only."""
        column, listed = REQUEST_COLUMNS[1 + event.selection_index], event.selection_list
        label = _label(column.title, is_shown=column.key in listed.selected)
        listed.replace_option_prompt_at_index(event.selection_index, label)

    def action_choose(self) -> None:
        shown = self.query_one(SelectionList).selected
        self.dismiss(frozenset(each.key for each in REQUEST_COLUMNS[1:] if each.key not in shown))


def _label(title: str, *, is_shown: bool) -> str:
    return title if is_shown else f"{title} (hidden)"
