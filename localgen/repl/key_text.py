"""The text that keys have typed."""

from __future__ import annotations

from collections.abc import Iterable

from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys

_ENTER = (Keys.ControlM, Keys.ControlJ)


def parse_keys(sent: str) -> list[KeyPress]:
    """The keys of what a terminal has sent."""
    presses: list[KeyPress] = []
    parser = Vt100Parser(presses.append)
    parser.feed(sent)
    parser.flush()
    return presses


def typed_text(presses: Iterable[KeyPress]) -> str:
    """Characters and pastes; Enter is a newline, Backspace deletes, other keys are left out."""
    text: list[str] = []
    is_with_alt = False
    for press in presses:
        if press.key == Keys.Backspace:
            del text[-1:]
        elif press.key in _ENTER:
            text.append("\n")
        elif press.key == Keys.BracketedPaste:
            lines = press.data.replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ")
            text += (key for key in lines if key.isprintable() or key in "\n\t")
        elif not isinstance(press.key, Keys) and press.key.isprintable() and not is_with_alt:
            text.append(press.key)
        is_with_alt = press.key == Keys.Escape
    return "".join(text)
