"""Terminal input that keeps pasted text from being read as keys."""

from __future__ import annotations

import codecs
import os
import re
import selectors
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.drivers.linux_inline_driver import LinuxInlineDriver
from textual.events import CursorPosition, Paste
from textual.message import Message

_ESC = "\x1b"
# a Unicode noncharacter, reserved for internal use: no text contains it
_ESC_PLACEHOLDER = "\ufdd0"
# CSI and SS3 begin a longer sequence
_ALT_KEY = re.compile(rf"{_ESC}[^{_ESC}\[O]$")
_READ_BYTES, _POLL_S = 4096, 0.1


class PasteSafeParser(XTermParser):
    """Parses keys, mouse events and pastes; escape sequences inside a paste stay text.

    Textual's own parser reads them as keys, so text copied from a web page could press keys. And it
    types `^y` for Alt+Y if the next key comes at once, as from a key that is held down.
    """

    def __init__(self) -> None:
        self._is_pasting = False
        self._recent_chars = ""  # last characters outside a paste
        self._held_back = ""  # possible start of the end-of-paste sequence
        self._last_fed = ""
        super().__init__()

    def feed(self, data: str) -> Iterable[Message]:
        """Messages in the next piece of input; an empty piece ends the input."""
        guarded = self._escape_pastes(data)
        if data and not guarded:
            return
        if not data:
            yield from super().feed(data)
        for piece in re.split(f"(?={_ESC})", guarded):
            if piece.startswith(_ESC) and _ALT_KEY.search(self._last_fed):
                yield from self._end_key()
            self._last_fed = (self._last_fed + piece)[-2:]
            for message in super().feed(piece) if piece else ():
                if isinstance(message, Paste):
                    message = Paste(message.text.replace(_ESC_PLACEHOLDER, _ESC))
                yield message

    def _end_key(self) -> Iterable[Message]:
        """The key that Textual would wait for the rest of."""
        if self._timeout_time is not None:
            self._timeout_time = 0.0
            yield from self.tick()

    def _escape_pastes(self, data: str) -> str:
        """Return the input with each ESC inside a paste replaced by the placeholder."""
        parts = []
        while data:
            take = self._read_inside_paste if self._is_pasting else self._read_outside_paste
            part, data = take(data)
            parts.append(part)
        return "".join(parts)

    def _read_outside_paste(self, data: str) -> tuple[str, str]:
        seen = self._recent_chars + data
        found = seen.find(BRACKETED_PASTE_START)
        if found < 0:
            self._recent_chars = seen[-(len(BRACKETED_PASTE_START) - 1) :]
            return data, ""
        self._is_pasting, self._recent_chars = True, ""
        begin = found + len(BRACKETED_PASTE_START) - (len(seen) - len(data))
        return data[:begin], data[begin:]

    def _read_inside_paste(self, data: str) -> tuple[str, str]:
        data, self._held_back = self._held_back + data, ""
        text, end, rest = data.partition(BRACKETED_PASTE_END)
        if end:
            self._is_pasting = False
        else:
            at = text.rfind(_ESC)
            if at >= 0 and BRACKETED_PASTE_END.startswith(text[at:]):
                text, self._held_back = text[:at], text[at:]
        return text.replace(_ESC, _ESC_PLACEHOLDER) + end, rest


class _PasteSafeInput(Driver):
    """Reads the terminal with PasteSafeParser; invalid UTF-8 is replaced, not fatal."""

    exit_event: threading.Event
    fileno: int
    if TYPE_CHECKING:  # both drivers have them

        def _enable_mouse_support(self) -> None: ...

        def _disable_mouse_support(self) -> None: ...

    def set_mouse(self, *, is_ours: bool) -> None:
        """Have the mouse reported to the app, or leave it to the terminal."""
        if is_ours:
            self._mouse = True
            self._enable_mouse_support()
        else:
            self._disable_mouse_support()
            self._mouse = False

    def run_input_thread(self) -> None:
        """Read and process input until the driver stops or the terminal is closed."""
        parser = PasteSafeParser()
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(_POLL_S):
                    read = os.read(self.fileno, _READ_BYTES)
                    if not read:
                        return
                    self._process_input(parser, decode(read))
                for message in parser.tick():
                    self.process_message(message)

    def _process_input(self, parser: PasteSafeParser, text: str) -> None:
        if text:  # empty after half a character; an empty piece would end the input
            for message in parser.feed(text):
                self.process_message(message)


class TerminalDriver(_PasteSafeInput, LinuxDriver):
    """Textual's Linux driver with this input."""


class InlineTerminalDriver(_PasteSafeInput, LinuxInlineDriver):
    """Textual's driver below the shell's prompt with this input."""

    def process_message(self, message: Message) -> None:
        """Take in where the screen begins, which the terminal was asked for."""
        if isinstance(message, CursorPosition):
            self.cursor_origin = (message.x, message.y)
        else:
            super().process_message(message)
