"""Text that a terminal shows and never obeys."""

from __future__ import annotations

_C0_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A, 0x0D)}
_REPLACEMENTS = {
    code: 0xFFFD
    for block in (
        range(0x80, 0xA0),  # C1: CSI, OSC and friends in one character
        range(0x202A, 0x202F),  # direction overrides: they make text look like other text
        range(0x2066, 0x206A),
        range(0xD800, 0xE000),  # lone surrogates cannot be written as UTF-8
    )
    for code in block
}
_TABLE: dict[int, int | None] = {**_C0_PICTURES, **_REPLACEMENTS, 0x7F: 0x2421, 0x0D: None}


def escape_control_chars(text: str) -> str:
    """The text with every control character but newline and tab made visible; \\r is dropped.

    Character by character, so a stream may be cut anywhere: an escape sequence that spans two
    pieces loses its ESC like any other.
    """
    return text.translate(_TABLE)


def one_line(text: str) -> str:
    """The text inert and on a single line."""
    return " ".join(escape_control_chars(text).split())
