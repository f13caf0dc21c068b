"""Choosing a name from a list, or typing one."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, OptionList

from localgen.tui.picker import Picker, has_words, named_row


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
