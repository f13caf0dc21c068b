"""Fenced code blocks of a prompt: how they are written, and a prompt with less of them."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^(`{3,})[^\n]*\n(.*?)^\1`*[ \t]*$", re.MULTILINE | re.DOTALL)


def fenced(body: str, language: str) -> str:
    """The text as a code block; its fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{body.removesuffix(chr(10))}\n{fence}"


def without_blocks(text: str) -> str:
    """The text between the code blocks."""
    return _BLOCK.sub("", text)


def with_short_blocks(text: str, max_lines: int) -> str:
    """The text with the first lines of longer code blocks, and how many follow."""

    def shorten(found: re.Match[str]) -> str:
        first, *lines, last = found[0].split("\n")
        if len(lines) <= max_lines:
            return found[0]
        more = f"… {len(lines) - max_lines + 1:,} lines more"
        return "\n".join((first, *lines[: max_lines - 1], more, last))

    return _BLOCK.sub(shorten, text)
