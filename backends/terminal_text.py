"""Escape control characters, so that untrusted text is safe to print on a terminal."""

from __future__ import annotations

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


def one_line(text: str) -> str:
    """Escape control characters and collapse all whitespace to single spaces."""
    return " ".join(escape_control_chars(text).split())
