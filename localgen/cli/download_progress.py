"""How far a download is: a bar with rate and time left on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from localgen.backends.terminal_text import one_line
from localgen.backends.units import size

# without a terminal, a line this often
_LINE_S = 10.0


class Transfer:
    """On stderr. Used as a context. total_bytes: of the whole; here: bytes that are here."""

    def __init__(self, name: str, total_bytes: int, here: int, console: Console | None = None):
        self._name = one_line(name)
        self._total = total_bytes
        self._first = self._now = here
        self._started_s = self._told_s = time.monotonic()
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = _bar(self._console) if self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task(self._name, total=total_bytes, completed=here)

    @property
    def position(self) -> str:
        """`1.2 of 4.9 GB`, more or less."""
        return f"{size(self._now)} of {size(self._total)}"

    def update(self, here: int) -> None:
        """here: bytes of the whole that are here now."""
        self._now = here
        if self._bar is not None:
            self._bar.update(self._task, completed=here)
        elif time.monotonic() - self._told_s >= _LINE_S:
            self._told_s = time.monotonic()
            self._print(f"{self._name}: {self.position}, {self._rate()}")

    def say(self, line: str) -> None:
        """Something that a user should know; it stays."""
        self._print(one_line(line))

    def __enter__(self) -> Transfer:
        resumed = f", {size(self._first)} of it is here" if self._first else ""
        self._print(f"pulling {self._name}, {size(self._total)}{resumed}")
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif error is None:
            seconds = time.monotonic() - self._started_s
            self._print(f"{self._name}: {size(self._total)} in {seconds:.0f} s")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _rate(self) -> str:
        rate = (self._now - self._first) / (time.monotonic() - self._started_s)
        if rate <= 0:
            return "nothing came yet"
        left_s = (self._total - self._now) / rate
        return f"{size(rate)}/s, {left_s // 60:.0f} min {left_s % 60:02.0f} s left"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
