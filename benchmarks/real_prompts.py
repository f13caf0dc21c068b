"""Passages of real texts in the repository: English prose, chats, and code."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
_CHARS = 1600
_HEADER = "<|im_start|>"


def prose(count: int) -> list[str]:
    """Passages of the documentation."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    return _pieces("\n\n".join(texts), count)


def code(count: int) -> list[str]:
    """Passages of Python's standard library."""
    return _pieces("\n\n".join(part for part in _mixed() if _HEADER not in part), count)


def chats(count: int) -> list[str]:
    """Short chats in ChatML, each up to an answer of the assistant."""
    text = "\n".join(part for part in _mixed() if part.startswith(_HEADER))
    return [
        f"{piece[: piece.rindex(_HEADER)]}{_HEADER}assistant\n" for piece in _pieces(text, count)
    ]


def _mixed() -> list[str]:
    text = (ROOT / "benchmarks/data/heldout.txt").read_text(encoding="utf-8")
    return text.split("\n\n")


def _pieces(text: str, count: int) -> list[str]:
    """Passages of whole lines, at most 1,600 characters each, spread evenly over a text."""
    stride = (len(text) - _CHARS) // count
    found = [text[at * stride : at * stride + _CHARS] for at in range(count)]
    return [piece[piece.index("\n") + 1 : piece.rindex("\n")] for piece in found]
