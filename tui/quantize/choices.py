"""One of a few values, all of them seen: a mark says which."""

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

from localgen.tui.widgets.picker import Picker, has_words, named_row

_CHOSEN, _OTHER, _REFUSED, _GAP = "●", "○", "·", 2


class Choices(Widget, can_focus=True):
    """options: values and what stands for them. Posts Changed when the user takes another."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "Value before", show=False),
        Binding("right,space", "step(1)", "Next value", show=False),
    ]
    DEFAULT_CSS = """
    Choices { width: 1fr; height: auto; }
    """

    class Changed(Message):
        """The user has taken a value."""

        def __init__(self, choices: Choices, value: object) -> None:
            super().__init__()
            self.choices = choices
            self.value = value

        @property
        def control(self) -> Choices:
            return self.choices

    def __init__(self, options: Sequence[tuple[object, str]], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._options = options
        self._value = options[0][0]
        self._refused: Mapping[object, str] = {}

    def show(self, value: object, refused: Mapping[object, str]) -> None:
        """refused: values that cannot be taken, and why."""
        if (value, refused) != (self._value, self._refused):
            self._value, self._refused = value, refused
            self.refresh(layout=True)

    @property
    def tooltip_of_refused(self) -> str:
        """Why values cannot be taken."""
        return "; ".join(dict.fromkeys(self._refused.values()))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._rows(width))

    def render(self) -> Content:
        rows = self._rows(self.content_size.width)
        return Content("\n").join(
            Content(" " * _GAP).join(self._drawn(value, label) for _, value, label in row)
            for row in rows
        )

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at is None:
            return
        rows = self._rows(self.content_size.width)
        row = rows[at.y] if at.y < len(rows) else []
        for x, value, label in row:
            if x <= at.x < x + len(label) + 2:
                self._take(value)

    def action_step(self, by: int) -> None:
        """The next value that can be taken; the ends are ends."""
        values = [value for value, _ in self._options]
        at = values.index(self._value)
        able = values[at + 1 :] if by > 0 else values[:at][::-1]
        for value in able:
            if not self._refused.get(value):
                self._take(value)
                return

    def _take(self, value: object) -> None:
        if value != self._value and not self._refused.get(value):
            self.post_message(self.Changed(self, value))

    def _rows(self, width: int) -> list[list[tuple[int, object, str]]]:
        """Column, value and label of each, as many in a row as there is room for."""
        rows: list[list[tuple[int, object, str]]] = [[]]
        x = 0
        for value, label in self._options:
            if rows[-1] and x + len(label) + 2 > width:
                rows.append([])
                x = 0
            rows[-1].append((x, value, label))
            x += len(label) + 2 + _GAP
        return rows

    def _drawn(self, value: object, label: str) -> Content:
        if self._refused.get(value):
            return Content.styled(f"{_REFUSED} {label}", "dim")
        if value != self._value:
            return Content(f"{_OTHER} {label}")
        style = "bold reverse" if self.has_focus else "bold $primary"
        return Content.assemble((f"{_CHOSEN} {label}", style))


class NamePicker(Picker[str]):
    """rows: names and what is said of them. hint: what may be typed that is not among them; empty:
    nothing. Closes with a name."""

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
            box.border_subtitle = "Enter takes one, Esc closes"
            hint = f"part of a name{self._hint and f', or {self._hint}'}"
            yield Input(placeholder=hint, compact=True, select_on_focus=False)
            yield OptionList(markup=False)

    def on_mount(self) -> None:
        self._fill("")

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        typed = event.value.strip()
        if self.highlighted is not None:
            self.take(self.highlighted)
        elif typed and self._hint:
            self.take(typed)

    def _fill(self, typed: str) -> None:
        rows = [
            (name, named_row(name, about, is_current=name == self._current))
            for name, about in self._rows
            if has_words(f"{name} {about}", typed)
        ]
        self.show(rows, self._current)
