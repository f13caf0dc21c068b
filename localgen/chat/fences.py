"""Fenced code blocks of a prompt: how they are written, and a prompt with less of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FENCE = re.compile(r"(`{3,})[^`]*")
# how the text of a file follows a prompt
_FILE_HEADING = re.compile(r"\n\n[^\n]+:\n`{3}")


def fenced(body: str, language: str) -> str:
    """The text as a code block; its fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{body.removesuffix(chr(10))}\n{fence}"


def with_file(prompt: str, heading: str, block: str) -> str:
    """The prompt with a heading and a code block below, unless it has that heading already."""
    return prompt if f"\n\n{heading}:\n```" in prompt else f"{prompt}\n\n{heading}:\n{block}"


def without_files(prompt: str) -> str:
    """The prompt without what with_file() has added."""
    return _FILE_HEADING.split(prompt, maxsplit=1)[0]


def without_blocks(text: str) -> str:
    """The text between the code blocks."""
    return "\n".join(line for lines, is_code in _parts(text) if not is_code for line in lines)


def with_short_blocks(text: str, max_lines: int) -> str:
    """The text with the first lines of longer code blocks, and how many follow."""
    kept: list[str] = []
    for lines, is_code in _parts(text):
        num_hidden = len(lines) - 2 - max_lines + 1
        if is_code and num_hidden > 1:
            more = f"… {num_hidden:,} lines more"
            kept += [*lines[:max_lines], more, lines[-1]]
        else:
            kept += lines
    return "\n".join(kept)


def _parts(text: str) -> Iterator[tuple[list[str], bool]]:
    """The lines of each code block and of the texts between; a block that stays open is text."""
    lines = text.split("\n")
    opened, fence, begin = 0, "", 0
    for at, line in enumerate(lines):
        if fence:
            if line.startswith(fence) and not line.strip().strip("`"):
                yield lines[begin:opened], False
                yield lines[opened : at + 1], True
                fence, begin = "", at + 1
        elif found := _FENCE.fullmatch(line):
            opened, fence = at, found[1]
    yield lines[begin:], False
