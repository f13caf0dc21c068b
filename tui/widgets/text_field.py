"""A text of several lines that is typed or pasted."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import TextArea

from localgen.backends.terminal_text import escape_control_chars


class TextField(TextArea):
    """Draws nothing that a terminal obeys; what is in it stays as it was pasted."""

    def get_line(self, line_index: int) -> Text:
        """As it is drawn."""
        line = super().get_line(line_index)
        line.plain = escape_control_chars(line.plain)
        return line
