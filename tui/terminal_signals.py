"""What an app tells the terminal besides the screen: its title, and that something is done."""

from __future__ import annotations

from collections.abc import Callable

from localgen.backends.terminal_text import one_line

_PUSH_TITLE, _POP_TITLE = "\x1b[22;2t", "\x1b[23;2t"
_MAX_TITLE = 80


class TerminalSignals:
    """write: writes to the terminal. Terminals ignore what they do not know."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._title = ""

    def set_title(self, title: str) -> None:
        """Set the title of the window or tab; the one before comes back with restore_title()."""
        title = one_line(title)[:_MAX_TITLE]
        if title != self._title:
            self._write(f"{_PUSH_TITLE if not self._title else ''}\x1b]2;{title}\x07")
            self._title = title

    def restore_title(self) -> None:
        if self._title:
            self._write(_POP_TITLE)
            self._title = ""

    def notify(self, message: str) -> None:
        """Ring the bell, and show a desktop notification where the terminal has them (OSC 9)."""
        self._write(f"\x07\x1b]9;{one_line(message)}\x07")
