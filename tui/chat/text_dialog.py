"""A dialog that asks for one line of text."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, Static

from localgen.tui.widgets.dialog import Dialog


class TextInputDialog(Dialog[str | None]):
    """Asks for a line of text. Closes with it, or None if cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel")]
    DEFAULT_CSS = """
    TextInputDialog > Vertical {
        width: 60; max-width: 95%; height: auto; padding: 1 2;
        border: round $primary; background: $surface; border-subtitle-color: $text-muted;
    }
    TextInputDialog Input { margin-top: 1; }
    """

    def __init__(self, question: str, text: str = "") -> None:
        super().__init__()
        self._question, self._text = question, text

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_subtitle = "Enter accepts, Esc cancels"
            yield Static(Content(self._question), markup=False)
            yield Input(self._text, compact=True, select_on_focus=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(event.value.strip())
