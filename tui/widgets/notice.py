"""A line for what is wrong, above everything else."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


class Notice(Static):
    """What is wrong and what to do; there only while something is."""

    DEFAULT_CSS = """
    Notice { display: none; height: auto; padding: 0 1; color: $warning; background: $surface; }
    Notice.-shown { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown_text = ""

    def show_message(self, text: str) -> None:
        """This; nothing: all is well."""
        if text == self._shown_text:  # an update lays the whole screen out anew
            return
        self._shown_text = text
        self.update(Content(text))
        self.set_class(bool(text), "-shown")
