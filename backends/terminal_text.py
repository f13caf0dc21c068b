"""Escape control characters, so that untrusted text is safe to print on a terminal and in logs."""

from __future__ import annotations

import re

_CONTROL = (
    r"\x00-\x08\x0b-\x1f\x7f"
    r"\x80-\x9f"  # C1 controls: CSI, OSC etc. as one character
    r"\u202a-\u202e\u2066-\u2069"  # bidirectional overrides, which can disguise text
    r"\ud800-\udfff"  # lone surrogates cannot be written as UTF-8
)
_IN_PROSE = re.compile(f"[{_CONTROL}]")
# also characters without a shape, which make two names look alike; but joiners belong to emoji and
# to some scripts, none of them ASCII
_IN_LINES = re.compile(
    rf"[\t\n{_CONTROL}"
    r"\u00ad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028\u2029\u2060-\u2065\u206a-\u206f"
    r"\u3164\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
    r"|(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])"
)


def one_line(text: str) -> str:
    r"""Write control and invisible characters as Python does, newline and tab too: \n, \x1b.

    For names, messages and log records: whatever they hold, they are one line.
    """
    return _IN_LINES.sub(_escape, text)


def escape_name(name: str) -> str:
    r"""A name as one_line(), with backslashes doubled: `\x1b` in a name differs from an escape.

    For names that are shown as such; one_line() keeps the result.
    """
    return one_line(name.replace("\\", "\\\\"))


def escape_control_chars(text: str) -> str:
    r"""Write control characters except newline and tab as Python does; \r\n is a newline.

    For prose such as an answer. Works character by character but for \r\n: see ProseStream.
    """
    return _IN_PROSE.sub(_escape, text.replace("\r\n", "\n"))


class ProseStream:
    r"""escape_control_chars() of a text in pieces, which may be cut between \r and \n."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str, *, last: bool = False) -> str:
        r"""The escaped text so far not returned, without a \r at the end unless it is the last."""
        text = self._held + piece
        self._held = "\r" if text.endswith("\r") and not last else ""
        return escape_control_chars(text.removesuffix(self._held))


def collapse(text: str) -> str:
    """Prose as one line: whitespace collapsed to single spaces, then as one_line()."""
    return one_line(" ".join(text.split()))


def _escape(match: re.Match[str]) -> str:
    # not by a codec: its module may have to be imported, which fails without file descriptors
    return ascii(match[0])[1:-1]
