"""Controls of the quantize form: radio choices in a row, and a picker for names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, OptionList

from localgen.tui.widgets.picker import Picker, matches_query, name_row

_SELECTED_MARK, _UNSELECTED_MARK, _DISABLED_MARK, _GAP = "●", "○", "·", 2


class RadioChoices(Widget, can_focus=True):
    """A row of options, one selected. options: (value, label). Posts Changed on user input."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "Previous value", show=False),
        Binding("right,space", "step(1)", "Next value", show=False),
    ]
    DEFAULT_CSS = """
    RadioChoices { width: 1fr; height: auto; }
    """

    class Changed(Message):
        """The user has selected a value."""

        def __init__(self, radio_choices: RadioChoices, value: object) -> None:
            super().__init__()
            self.radio_choices = radio_choices
            self.value = value

        @property
        def control(self) -> RadioChoices:
            return self.radio_choices

    def __init__(self, options: Sequence[tuple[object, str]], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._options = options
        self._value = options[0][0]
        self._disabled_reasons: Mapping[object, str] = {}

    def show_value(self, value: object, disabled_reasons: Mapping[object, str]) -> None:
        """Show a value as selected. disabled_reasons: why values cannot be selected, by value."""
        if (value, disabled_reasons) != (self._value, self._disabled_reasons):
            self._value, self._disabled_reasons = value, disabled_reasons
            self.refresh(layout=True)

    @property
    def disabled_reason_text(self) -> str:
        """Why some values cannot be selected, for display."""
        return "; ".join(dict.fromkeys(self._disabled_reasons.values()))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._wrapped_options(width))

    def render(self) -> Content:
        rows = self._wrapped_options(self.content_size.width)
        return Content("\n").join(
            Content(" " * _GAP).join(self._option_content(value, label) for _, value, label in row)
            for row in rows
        )

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at is None:
            return
        rows = self._wrapped_options(self.content_size.width)
        row = rows[at.y] if at.y < len(rows) else []
        for x, value, label in row:
            if x <= at.x < x + len(label) + 2:
                self._select(value)

    def action_step(self, by: int) -> None:
        """Select the next enabled value in a direction, without wrapping around."""
        values = [value for value, _ in self._options]
        at = values.index(self._value)
        able = values[at + 1 :] if by > 0 else values[:at][::-1]
        for value in able:
            if not self._disabled_reasons.get(value):
                self._select(value)
                return

    def _select(self, value: object) -> None:
        if value != self._value and not self._disabled_reasons.get(value):
            self.post_message(self.Changed(self, value))

    def _wrapped_options(self, width: int) -> list[list[tuple[int, object, str]]]:
        """Rows of (column, value, label), wrapped at the width."""
        rows: list[list[tuple[int, object, str]]] = [[]]
        x = 0
        for value, label in self._options:
            if rows[-1] and x + len(label) + 2 > width:
                rows.append([])
                x = 0
            rows[-1].append((x, value, label))
            x += len(label) + 2 + _GAP
        return rows

    def _option_content(self, value: object, label: str) -> Content:
        if self._disabled_reasons.get(value):
            return Content.styled(f"{_DISABLED_MARK} {label}", "dim")
        if value != self._value:
            return Content(f"{_UNSELECTED_MARK} {label}")
        style = "bold reverse" if self.has_focus else "bold $primary"
        return Content.assemble((f"{_SELECTED_MARK} {label}", style))


class NamePicker(Picker[str]):
    """Chooses a name. Closes with it, or None.

    rows: (name, description). hint: describes free text that is accepted too, or empty if none is.
    """

    DEFAULT_CSS = """
    NamePicker > Vertical { max-width: 80; }
    """

    def __init__(
        self, title: str, rows: Sequence[tuple[str, str]], current: str, hint: str = ""
    ) -> None:
        super().__init__()
        self._title, self._rows, self._current, self._hint = title, rows, current, hint

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            box.border_subtitle = "Enter selects, Esc closes"
            hint = f"part of a name{self._hint and f', or {self._hint}'}"
            yield Input(placeholder=hint, compact=True, select_on_focus=False)
            yield OptionList(markup=False)

    def on_mount(self) -> None:
        self._filter_rows("")

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter_rows(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        typed = event.value.strip()
        if self.highlighted is not None:
            self.select_item(self.highlighted)
        elif typed and self._hint:
            self.select_item(typed)

    def _filter_rows(self, query: str) -> None:
        rows = [
            (name, name_row(name, about, is_current=name == self._current))
            for name, about in self._rows
            if matches_query(f"{name} {about}", query)
        ]
        typed = self._hint and f"; Enter takes what is typed: {self._hint}"
        self.show_rows(rows, self._current, f"no match{typed}")
