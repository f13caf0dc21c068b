"""A multi-line text field."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import TextArea

# each character keeps its one cell, so that the cursor stays where it is
_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A, 0x0D)}
_SYMBOLS: dict[int, int | None] = {
    **_PICTURES,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),
    0x7F: 0x2421,
    0x0D: None,
}


class TextField(TextArea):
    """A TextArea that draws a symbol for each control character; its text keeps them."""

    def get_line(self, line_index: int) -> Text:
        """The line as drawn: with symbols for control characters."""
        line = super().get_line(line_index)
        line.plain = line.plain.translate(_SYMBOLS)
        return line
