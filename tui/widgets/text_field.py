"""A multi-line text field."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import TextArea

from localgen.backends.terminal_text import escape_control_chars


class TextField(TextArea):
    """A TextArea that draws control characters escaped; its text keeps them."""

    def get_line(self, line_index: int) -> Text:
        """The line as drawn: control characters escaped."""
        line = super().get_line(line_index)
        line.plain = escape_control_chars(line.plain)
        return line
