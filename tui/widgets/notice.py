"""A warning line at the top of a screen."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


class Notice(Static):
    """A problem and how to fix it; hidden while there is none."""

    DEFAULT_CSS = """
    Notice { display: none; height: auto; padding: 0 1; color: $warning; background: $surface; }
    Notice.-shown { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown_text = ""

    def show_message(self, text: str) -> None:
        """Show a message; an empty one hides the widget."""
        if text == self._shown_text:  # an update would lay out the whole screen
            return
        self._shown_text = text
        self.update(Content(text))
        self.set_class(bool(text), "-shown")
