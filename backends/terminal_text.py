"""Escape control characters, so that untrusted text is safe to print on a terminal."""

from __future__ import annotations

import re

_C0_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A, 0x0D)}
_REPLACEMENTS = {
    code: 0xFFFD
    for block in (
        range(0x80, 0xA0),  # C1 controls: CSI, OSC etc. as one character
        range(0x202A, 0x202F),  # bidirectional overrides, which can disguise text
        range(0x2066, 0x206A),
        range(0xD800, 0xE000),  # lone surrogates cannot be written as UTF-8
    )
    for code in block
}
_TABLE: dict[int, int | None] = {**_C0_PICTURES, **_REPLACEMENTS, 0x7F: 0x2421, 0x0D: None}


def escape_control_chars(text: str) -> str:
    """Replace control characters except newline and tab by visible ones, and drop \\r.

    Works character by character, so a stream may be split anywhere: an escape sequence across two
    chunks loses its ESC like any other.
    """
    return text.translate(_TABLE)


# characters without a shape, which make two names look alike; but joiners belong to emoji and to
# some scripts, none of them ASCII
_INVISIBLE = re.compile(
    r"[\u00ad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028\u2029\u2060-\u2065\u206a-\u206f"
    r"\u3164\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
    r"|(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])"
)


def one_line(text: str) -> str:
    """Escape control and invisible characters; collapse all whitespace to single spaces.

    For names and messages. Prose such as an answer may have invisible characters.
    """
    return " ".join(_INVISIBLE.sub("\ufffd", escape_control_chars(text)).split())


def escape_unprintable(text: str) -> str:
    """Replace every character that is not printable, except tab, by its escape in Python.

    For logs: newline too, so that the text stays one line.
    """
    if text.isprintable():
        return text
    # not by a codec: its module may have to be imported, which fails without file descriptors
    return "".join(
        char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in text
    )
