"""What the wait for a server and a model looks like: progress that goes, news that stays."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from localgen.backends.terminal_text import one_line


class LoadProgressLine:
    """A line of progress on a terminal, nothing elsewhere. Used as a context.

    It shows from the first progress on: what is loaded already shows nothing.
    console: where; what else is drawn meanwhile must be drawn there too. has_loaded: whether
    something had to be loaded at all.
    """

    def __init__(self, console: Console, name: str) -> None:
        self.console = console
        self._name = name
        self._status = Status(_dim(f"loading {name}"), console=console)
        self._is_terminal = console.is_terminal
        self.has_loaded = False

    def notify(self, message: str) -> None:
        """What the client did that a user should know; it stays."""
        if self._is_terminal:
            self.console.print(_dim(message))

    def update(self, fraction: float) -> None:
        """Share of the weights read, 0 to 1."""
        self.has_loaded = True
        if self._is_terminal:
            self._status.start()
        self._status.update(_dim(f"loading {self._name} {fraction:.0%}"))

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


def _dim(message: str) -> Text:
    return Text(one_line(message), style="dim", no_wrap=True)
