"""How far a quantization is, in lines and bars on stderr, and its verdict as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from localgen.backends.terminal_text import one_line
from localgen.chats.report import size
from localgen.cli import tables
from localgen.quant.report import Row

# without a terminal, a line this often
_LINE_S = 10.0


class Steps:
    """A bar on a terminal with the time left, now and then a line elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = _bar(self._console) if self._console.is_terminal else None
        self._what = ""
        self._first = 0
        self._told_s = self._started_s = time.monotonic()
        self._task: Any = None
        if self._bar is not None:
            self._bar.start()

    def end(self) -> None:
        """Nothing more is drawn."""
        if self._bar is not None:
            self._bar.stop()

    def at(self, what: str, done: int, total: int, unit: str = "layers") -> None:
        """done: of `total` so far."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._first, self._started_s, self._told_s = what, done, now, now
            if self._bar is not None:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(one_line(what), total=total, completed=done)
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif now - self._told_s >= _LINE_S or done == total:
            self._told_s = now
            tell(f"{what}: {_count(done, unit)} of {_count(total, unit)}{self._left(done, total)}")

    def _left(self, done: int, total: int) -> str:
        done_here = done - self._first
        if not done_here or done == total:
            return ""
        left_s = (time.monotonic() - self._started_s) / done_here * (total - done)
        return f", {minutes(left_s)} left"


def tell(line: str) -> None:
    """Something that a user should know."""
    print(one_line(line), file=sys.stderr, flush=True)


def minutes(seconds: float) -> str:
    """`1 h 05 min`, `3 min 20 s` or `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{seconds:.0f} s"


def as_json(rows: Sequence[Row], **more: Any) -> str:
    """One object: the rows, and what else there is to say."""
    return tables.json_text({"models": [asdict(row) for row in rows]} | more, indent=2)


def _count(number: int, unit: str) -> str:
    return size(number) if unit == "bytes" else f"{number:,} {unit}"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
        console=console,
    )
