"""The command palette: every command of the screen with its key, those used last first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList

from localgen.tui.widgets.alignment import align_ends
from localgen.tui.widgets.picker import Picker, matches_query

_WIDTH = 60
# border, padding, and the scrollbar of a long list
_FRAME_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Command:
    """A command. key: as shown, or empty. run: called after the palette has closed."""

    name: str
    key: str
    run: Callable[[], Awaitable[None] | None]


class CommandPalette(Picker[Command]):
    """Closes with the chosen command. commands: in the order to show them in."""

    DEFAULT_CSS = f"""
    CommandPalette > Vertical {{ width: {_WIDTH}; max-width: 100%; height: auto; max-height: 80%; }}
    CommandPalette OptionList {{ height: auto; max-height: 70vh; scrollbar-size-vertical: 1; }}
    """

    def __init__(self, commands: Sequence[Command]) -> None:
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Commands"
            box.border_subtitle = "Enter runs, Esc closes"
            yield Input(placeholder="part of a name", compact=True)
            yield OptionList(markup=False)

    def on_mount(self) -> None:
        self._filter("")

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter(event.value)

    def on_input_submitted(self) -> None:
        if self.highlighted is not None:
            self.dismiss(self.highlighted)

    def _filter(self, query: str) -> None:
        found = [each for each in self._commands if matches_query(each.name, query)]
        self.show_rows(((each, _row(each)) for each in found), empty_text="no match")


def _row(command: Command) -> Content:
    key = Content.styled(command.key, "$accent")
    width = _WIDTH - _FRAME_COLUMNS
    name = Content(command.name).truncate(width - key.cell_length - 1, ellipsis=True)
    return align_ends(name, key, width)
