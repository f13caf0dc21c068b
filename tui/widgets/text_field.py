"""A multi-line text field."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import TextArea

# each character keeps its one cell, so that the cursor stays where it is; \n and \r end lines
_SYMBOLS = {
    **{code: 0x2400 + code for code in range(0x20) if code != 0x09},
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),
    0x7F: 0x2421,
}


class TextField(TextArea):
    """A TextArea that draws a symbol of one cell for each control character.

    It writes no escapes as read-only text has them: those would be edited and sent as typed, and
    the text that is sent keeps its characters. Its cursor does not blink: that took more CPU than
    all else while nothing happens, and wrote to the terminal all the time.
    """

    def on_mount(self) -> None:
        self.cursor_blink = False

    def get_line(self, line_index: int) -> Text:
        """The line as drawn: with symbols for control characters."""
        # not from the line that TextArea makes, which loses some of them
        text = self.document.get_line(line_index).translate(_SYMBOLS)
        return Text(text, end="", no_wrap=True)
