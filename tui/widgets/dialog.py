"""Modal dialogs: base class, scrollable text, yes/no question."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

_Result = TypeVar("_Result")


class Dialog(ModalScreen[_Result]):
    """Base of modal dialogs. F1 shows its keys; a click outside closes it as Esc does."""

    DEFAULT_CSS = """
    Dialog { align: center middle; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "app.keys", "Keys", show=False, key_display="F1"),
        # no description: in a text field `?` is an ordinary character
        Binding("question_mark", "app.keys", show=False),
    ]

    @property
    def is_open(self) -> bool:
        """True while it is on the screen stack; async results may arrive after it was closed."""
        return self in self.app.screen_stack

    async def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            leave = self.active_bindings["escape"]
            await self.app.run_action(leave.binding.action, leave.node)


class ScrollableTextDialog(Dialog[None]):
    """A text of any length that can be scrolled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Close", show=False)
    ]
    DEFAULT_CSS = """
    ScrollableTextDialog VerticalScroll {
        width: 90%; max-width: 110; height: auto; max-height: 90%; padding: 0 1;
        border: round $primary; background: $surface; border-title-color: $primary;
        border-subtitle-color: $text-muted; scrollbar-size-vertical: 1;
    }
    """

    def __init__(self, title: str, text: Content) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = Content(self._title)
            box.border_subtitle = "Esc closes"
            yield Static(self._text)


class ConfirmDialog(Dialog[bool]):
    """A yes/no question; focus starts on No, the safe answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
        Binding("left,right", "app.focus_next", "Other button", show=False),
    ]
    DEFAULT_CSS = """
    ConfirmDialog > Vertical {
        width: 56; max-width: 95%; height: auto; padding: 1 2;
        border: round $warning; background: $surface;
    }
    ConfirmDialog Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    ConfirmDialog Button { margin-left: 2; min-width: 14; }
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
        """Close with this answer."""
        self.dismiss(answer)
