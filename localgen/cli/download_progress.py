"""Download progress: a bar with rate and time left on a terminal, lines otherwise."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_elapsed, format_size

# interval of progress lines without a terminal
_LINE_INTERVAL_S = 10.0
_RATE_PERIOD_S = 10.0
_STALLED_AFTER_S = 2.0


class TransferRate:
    """The rate of the last ten seconds. Times are monotonic seconds.

    total_bytes: size of the download.
    """

    def __init__(self, total_bytes: int, downloaded_bytes: int, now_s: float) -> None:
        self._total_bytes = total_bytes
        # time and downloaded bytes, whenever these grew; never emptied: rich's thread reads them
        self._samples = deque([(now_s, downloaded_bytes)])

    def update(self, downloaded_bytes: int, now_s: float) -> None:
        """Record the number of downloaded bytes; it may also shrink, if a file starts over.

        The same number before the first block: the time until then does not count.
        """
        last_bytes, is_new = self._samples[-1][1], len(self._samples) == 1
        if downloaded_bytes < last_bytes or (downloaded_bytes == last_bytes and is_new):
            self._samples = deque([(now_s, downloaded_bytes)])
        if downloaded_bytes <= last_bytes:
            return
        self._samples.append((now_s, downloaded_bytes))
        while len(self._samples) > 2 and self._samples[1][0] < now_s - _RATE_PERIOD_S:
            self._samples.popleft()

    def text(self, now_s: float) -> str:
        """For example `8.2 MB/s, 1 min 02 s left`; `stalled` after two seconds without a byte."""
        samples = self._samples
        (start_s, start_bytes), (last_s, last_bytes) = samples[0], samples[-1]
        if last_bytes == start_bytes or now_s == start_s:
            return "no data yet"
        left_bytes = self._total_bytes - last_bytes
        if left_bytes and now_s - last_s >= _STALLED_AFTER_S:
            return "stalled, 0 B/s"
        rate = (last_bytes - start_bytes) / (now_s - start_s)
        left = f", {format_elapsed(left_bytes / rate)} left" if left_bytes else ""
        return f"{format_size(rate)}/s{left}"


class _RateColumn(ProgressColumn):
    def __init__(self, rate: TransferRate) -> None:
        super().__init__()
        self._rate = rate

    def render(self, task: Task) -> Text:
        return Text(self._rate.text(time.monotonic()))


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
        self._rate = TransferRate(total_bytes, downloaded_bytes, self._started_s)
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = _create_bar(self._console, self._rate) if self._console.is_terminal else None
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
        now_s = time.monotonic()
        self._downloaded_bytes = downloaded_bytes
        self._rate.update(downloaded_bytes, now_s)
        if self._bar is not None:
            self._bar.update(self._task, completed=downloaded_bytes)
        elif now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            self._print(f"{self._name}: {self.position}, {self._rate.text(now_s)}")

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


def _create_bar(console: Console, rate: TransferRate) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        _RateColumn(rate),
        console=console,
    )
