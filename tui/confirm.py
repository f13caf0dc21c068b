"""A question that has to be answered before something is lost."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Button, Static

from localgen.tui.dialog import Dialog


class Confirm(Dialog[bool]):
    """Yes or no. The key that takes nothing away has the focus."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
        Binding("left,right", "app.focus_next", "Other button", show=False),
    ]
    DEFAULT_CSS = """
    Confirm > Vertical {
        width: 56; max-width: 95%; height: auto; padding: 1 2;
        border: round $warning; background: $surface;
    }
    Confirm Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    Confirm Button { margin-left: 2; min-width: 14; }
    """

    def __init__(self, question: str, *, yes: str, no: str) -> None:
        super().__init__()
        self._question, self._yes, self._no = question, yes, no

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Content(self._question))
            with Horizontal():
                yield Button(f"{self._no} (n)", id="no", compact=True)
                yield Button(f"{self._yes} (y)", id="yes", variant="warning", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        """Close with it."""
        self.dismiss(answer)
