"""Download progress: a bar with rate and time left on a terminal, lines otherwise."""

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
from localgen.backends.units import format_size

# interval of progress lines without a terminal
_LINE_INTERVAL_S = 10.0


class DownloadProgress:
    """Download progress on stderr; a context manager.

    total_bytes: size of the download. downloaded_bytes: bytes already on disk.
    """

    def __init__(
        self, name: str, total_bytes: int, downloaded_bytes: int, console: Console | None = None
    ):
        self._name = one_line(name)
        self._total_bytes = total_bytes
        self._initial_bytes = self._downloaded_bytes = downloaded_bytes
        self._started_s = self._last_line_s = time.monotonic()
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = _create_bar(self._console) if self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task(
                self._name, total=total_bytes, completed=downloaded_bytes
            )

    @property
    def position(self) -> str:
        """Downloaded and total size, for example `1.2 GB of 4.9 GB`."""
        return f"{format_size(self._downloaded_bytes)} of {format_size(self._total_bytes)}"

    def update(self, downloaded_bytes: int) -> None:
        """Set the number of bytes on disk, those of earlier runs included."""
        self._downloaded_bytes = downloaded_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=downloaded_bytes)
        elif time.monotonic() - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            self._print(f"{self._name}: {self.position}, {self._rate_text()}")

    def notify(self, line: str) -> None:
        """Print a line above the bar."""
        self._print(one_line(line))

    def __enter__(self) -> DownloadProgress:
        resumed = (
            f", {format_size(self._initial_bytes)} already downloaded"
            if self._initial_bytes
            else ""
        )
        self._print(f"downloading {self._name}, {format_size(self._total_bytes)}{resumed}")
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
            self._print(f"{self._name}: {format_size(self._total_bytes)} in {seconds:.0f} s")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _rate_text(self) -> str:
        rate = (self._downloaded_bytes - self._initial_bytes) / (time.monotonic() - self._started_s)
        if rate <= 0:
            return "no data yet"
        left_s = (self._total_bytes - self._downloaded_bytes) / rate
        return f"{format_size(rate)}/s, {left_s // 60:.0f} min {left_s % 60:02.0f} s left"


def _create_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
