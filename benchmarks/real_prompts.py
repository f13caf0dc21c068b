"""Pieces of real texts from the repository: English prose, chats, and code."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
_CHARS = 1600
_HEADER = "<|im_start|>"


def prose(count: int) -> list[str]:
    """Pieces of the documentation."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    return _pieces("\n\n".join(texts), count)


def code(count: int) -> list[str]:
    """Pieces of Python's standard library."""
    return _pieces("\n\n".join(part for part in _mixed() if _HEADER not in part), count)


def chats(count: int) -> list[str]:
    """Short chats in ChatML; each ends where the assistant answers."""
    text = "\n".join(part for part in _mixed() if part.startswith(_HEADER))
    return [
        f"{piece[: piece.rindex(_HEADER)]}{_HEADER}assistant\n" for piece in _pieces(text, count)
    ]


def _mixed() -> list[str]:
    text = (ROOT / "benchmarks/data/heldout.txt").read_text(encoding="utf-8")
    return text.split("\n\n")


def _pieces(text: str, count: int) -> list[str]:
    """Whole lines of about 1,600 characters together, evenly spread over a text."""
    stride = (len(text) - _CHARS) // count
    found = [text[at * stride : at * stride + _CHARS] for at in range(count)]
    return [piece[piece.index("\n") + 1 : piece.rindex("\n")] for piece in found]
