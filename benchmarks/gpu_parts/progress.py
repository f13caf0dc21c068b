"""Progress on stderr: what runs is named before it runs, so the last line names what crashed."""

from __future__ import annotations

import sys

CASE = "> "


def progress(line: str) -> None:
    """Print a progress line."""
    print(line, file=sys.stderr, flush=True)


def case_begins(name: str) -> None:
    """Name a case before it runs."""
    progress(f"{CASE}{name}")
