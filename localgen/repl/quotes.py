"""Three quotes: how a prompt of several lines is typed."""

from __future__ import annotations

QUOTES = '"""'
_OPENINGS = ("", "/set system ")


def is_open(text: str) -> bool:
    """Whether three quotes were opened, at the start or after `/set system`, and not closed."""
    body = text.lstrip()
    return any(
        body.startswith(opening + QUOTES) and not _closed(body.removeprefix(opening).rstrip())
        for opening in _OPENINGS
    )


def unquoted(text: str) -> str:
    """A prompt without the three quotes around it."""
    body = text.strip()
    if body.startswith(QUOTES) and _closed(body):
        return body[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def _closed(quoted: str) -> bool:
    return len(quoted) >= 2 * len(QUOTES) and quoted.endswith(QUOTES)
