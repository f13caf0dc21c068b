"""Progress of starting the server and loading a model: a transient line and lasting notices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from localgen.backends import units
from localgen.backends.terminal_text import one_line
from localgen.backends.types import PromptProgress
from localgen.chat import report


class LoadProgressLine:
    """A progress line on a terminal, no output otherwise; a context manager.

    The line appears at the first update(), so nothing is shown for a loaded model.
    console: all other output must go through it meanwhile. has_loaded: a model had to be loaded.
    """

    def __init__(self, console: Console, name: str) -> None:
        self.console = console
        self._name = name
        self._status = Status(_dim(f"loading {name}"), console=console)
        self._is_terminal = console.is_terminal
        self._started_s: float | None = None  # of the first update()
        self._show: Callable[[str], None] | None = None
        self.has_loaded = False

    def notify(self, message: str) -> None:
        """Print a lasting notice, for example that the server was started."""
        if self._show is not None:
            self._show(message)
        elif self._is_terminal:
            self.console.print(_dim(message))

    def print_notice(self, message: str) -> None:
        """Print a lasting notice, on a pipe too."""
        text = Text(one_line(message), style="dim")
        self.console.print(text, soft_wrap=not self._is_terminal)

    @contextlib.contextmanager
    def notices_to(self, show: Callable[[str], None]) -> Iterator[None]:
        """Within the block, pass notices to `show` instead of printing them."""
        self._show = show
        try:
            yield
        finally:
            self._show = None

    def update(self, fraction: float) -> None:
        """Show the fraction of the weights that is loaded, 0 to 1, and the seconds so far.

        A large model stays at 0 or 100 % for a while.
        """
        self.has_loaded = True
        if self._started_s is None:
            self._started_s = time.monotonic()
        if self._is_terminal:
            self._status.start()
        elapsed = units.format_elapsed(time.monotonic() - self._started_s)
        self._status.update(_dim(f"loading {self._name} {fraction:.0%} · {elapsed}"))

    @contextlib.contextmanager
    def reading(self, progress: Callable[[], PromptProgress | None]) -> Iterator[None]:
        """Within the block, show how much of a prompt is computed."""
        if not self._is_terminal:
            yield
            return
        self._status.update(_WaitingText(progress))
        self._status.start()
        try:
            yield
        finally:
            self._status.stop()

    def __enter__(self) -> LoadProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_terminal:
            self._status.stop()


class _WaitingText:
    """How long an answer has been waited for, each time it is drawn."""

    def __init__(self, progress: Callable[[], PromptProgress | None]) -> None:
        self._progress, self._started_s = progress, time.monotonic()

    def __rich__(self) -> Text:
        return _dim(report.waiting_text(time.monotonic() - self._started_s, self._progress()))


def _dim(message: str) -> Text:
    return Text(one_line(message), style="dim", no_wrap=True)
