"""What is being quantized in a program: one model at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from localgen.backends.errors import InvalidRequest
from localgen.quant.originals import require_packages
from localgen.quant.process import Child, Work
from localgen.quant.request import form as choices
from localgen.quant.request.form import Choice
from localgen.quant.request.request import Asked
from localgen.tui.quantize.run import Run

# begins to make what is asked for, or only looks at what that would take
Start = Callable[[Asked, bool], Work]


def child(asked: Asked, looks: bool) -> Work:
    """In a process of its own."""
    return Child(asked, looks=looks)


class Workshop:
    """state_dir: where what was chosen last is remembered. is_elsewhere: the program talks to a
    server of another machine. run: the one that goes on, or the last one."""

    def __init__(
        self,
        state_dir: Path,
        start: Start = child,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_elsewhere: bool = False,
    ) -> None:
        self.run: Run | None = None
        self._kept = state_dir / "quantize.json"
        self._start, self._clock, self._is_elsewhere = start, clock, is_elsewhere
        self._announced: Run | None = None

    def require(self) -> None:
        """InvalidRequest, LoadFailed: nothing can be quantized from here."""
        if self._is_elsewhere:
            raise InvalidRequest(
                "a model is quantized on the machine where it lies: localgen tui without --url, "
                "or localgen quantize there"
            )
        require_packages()

    @property
    def is_running(self) -> bool:
        return self.run is not None and self.run.is_running

    def first(self) -> Choice:
        """What a form begins with: what there is to be gone on with, else the usual."""
        if self.run is not None:
            return self.run.choice
        kept = choices.kept(self._kept)
        if kept is None or not choices.is_unfinished(kept):
            return Choice()
        return choices.seen_from_here(kept)

    def look(self, asked: Asked) -> Work:
        """Find out what it would take. LoadFailed: no process can be started."""
        return self._start(asked, True)

    def begin(self, choice: Choice, *, resume: bool) -> Run:
        """InvalidRequest: one is going on. LoadFailed: no process can be started."""
        if self.is_running:
            raise InvalidRequest("a model is being quantized: one at a time")
        run = Run(choice, self._start(choice.asked(resume=resume), False), self._clock)
        choices.keep(choices.placed(choice), self._kept)
        self.run = run
        run.start()
        return run

    def stop(self) -> None:
        if self.run is not None and self.run.is_running:
            self.run.stop()

    def seen(self) -> None:
        """Whoever asked has seen how the last run ended."""
        self._announced = self.run

    def news(self) -> str:
        """How the run ended, said once; empty while there is nothing to say."""
        if self.run is None or self.run.is_running or self.run is self._announced:
            return ""
        self.seen()
        return f"{self.run.line()} · F10 shows it"
