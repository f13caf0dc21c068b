"""One quantization that goes on, whatever screen is shown."""

from __future__ import annotations

import threading
from collections.abc import Callable

from localgen.backends.errors import LocalgenError
from localgen.quant.events import At, Event, Made, Needs, Note, Stopped, Verdict, both
from localgen.quant.process import Work
from localgen.quant.report import Row
from localgen.quant.request.form import Choice
from localgen.tui import figures
from localgen.tui.quantize.pace import Pace
from localgen.tui.quantize.wording import on_screen

_MEMORY_EACH_S = 1.0


class Run:
    """Gathers what the work tells, in a thread of its own, which alone writes to it.

    error: why it failed. ended: set last of all.
    """

    def __init__(self, choice: Choice, work: Work, clock: Callable[[], float]) -> None:
        self.choice = choice
        self.name = choice.out_path.name
        self.needs: Needs | None = None
        self.at: At | None = None
        self.notes: tuple[str, ...] = ()
        self.made: Made | None = None
        self.rows: tuple[Row, ...] = ()
        self.stopped: Stopped | None = None
        self.error = ""
        self.ended = threading.Event()
        self.is_stopping = False
        self._work, self._clock = work, clock
        self._started_s = clock()
        self._ended_s: float | None = None
        self._memory: int | None = None
        self._memory_s = float("-inf")
        self._pace = Pace(clock)
        self._thread = threading.Thread(target=self._follow, name="quantize", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once; `ended` follows, and what is done stays."""
        self.is_stopping = True
        self._work.stop()

    @property
    def is_running(self) -> bool:
        return not self.ended.is_set()

    @property
    def took_s(self) -> float:
        """So far, or in all."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._started_s

    @property
    def left_s(self) -> float | None:
        """Of the step that it is at; None: not known."""
        return self._pace.left_s()

    def memory_bytes(self) -> int | None:
        """What it has in memory, asked for once a second."""
        if self._clock() - self._memory_s >= _MEMORY_EACH_S:
            self._memory_s = self._clock()
            self._memory = self._work.memory_bytes()
        return self._memory

    @property
    def place(self) -> str:
        """Where in the step it is: `layer 3 of 8`, `45%`."""
        if self.at is None:
            return "beginning"
        done, total = self.at.done, self.at.total
        if self.at.unit == "bytes":
            return figures.percent(done / total if total else 1.0)
        return f"{self.at.unit.removesuffix('s')} {min(done + 1, total)} of {total}"

    @property
    def step(self) -> str:
        """What it does, and where in that it is."""
        return self.place if self.at is None else f"{self.at.step}, {self.place}"

    def line(self) -> str:
        """How it goes or went, in one line."""
        if self.is_running:
            left = "" if self.left_s is None else f", {figures.clock(self.left_s)} left"
            is_layer = self.at is not None and self.at.unit == "layers"
            where = f"{self.place if is_layer else self.step}{left}"
            return f"quantizing {self.name}: {'stopping' if self.is_stopping else where}"
        if self.made is not None:
            return f"{self.name} is made"
        if self.error:
            return f"{self.name} was not made: {self.error}"
        return f"quantizing {self.name} was stopped"

    def _follow(self) -> None:
        try:
            for event in self._work.events():
                self._take(event)
        except LocalgenError as error:
            self.error = on_screen(error.message)
        except Exception as error:  # a user sees a sentence, and the chats go on
            self.error = f"a defect of localgen ({type(error).__name__}: {error})"
        finally:
            self._work.end()
            self._ended_s = self._clock()
            self.ended.set()

    def _take(self, event: Event) -> None:
        match event:
            case Needs():
                self.needs = both(self.needs, event)
            case At(step, done, total):
                self.at = event
                self._pace.at(step, done, total)
            case Note(text):
                self.notes = (*self.notes, on_screen(text))
            case Made():
                self.made = event
            case Verdict(rows):
                self.rows = rows
            case Stopped():
                self.stopped = event
