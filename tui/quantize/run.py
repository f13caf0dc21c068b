"""One quantization that goes on, whatever screen is shown."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable

from localgen.backends.errors import LocalgenError
from localgen.quant.events import At, Event, Made, Needs, Note, Stopped, Verdict, both
from localgen.quant.process import Work
from localgen.quant.report import Row
from localgen.quant.request.form import Choice
from localgen.tui.widgets import numbers

# so long a measurement counts for
_MEMORY_S = 20.0


class Pace:
    """Learns what one of many takes, by those that were done while somebody looked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step = ""
        self._done = self._total = 0
        self._at_s = 0.0
        self._each_s: float | None = None

    def at(self, step: str, done: int, total: int) -> None:
        """How far it is now."""
        now = self._clock()
        if step != self._step or done < self._done:
            self._step, self._done, self._at_s, self._each_s = step, done, now, None
        elif done > self._done:
            took_s = now - self._at_s
            each_s = took_s / (done - self._done)
            if self._each_s is not None:
                weight = 1 - math.exp(-took_s / _MEMORY_S)
                each_s = self._each_s + weight * (each_s - self._each_s)
            self._each_s, self._done, self._at_s = each_s, done, now
        self._total = total

    def left_s(self) -> float | None:
        """Of the step; None: not known yet."""
        if self._each_s is None:
            return None
        # the one that is being worked on goes on since
        going_s = min(self._clock() - self._at_s, self._each_s)
        return max(0.0, self._each_s * (self._total - self._done) - going_s)


# what has a field or a key here is called by it; the rest is an option of a command
_SAID = (
    ("run again with --resume", "press Ctrl+R to go on"),
    ("--resume goes on", "Ctrl+R goes on"),
    ("another --out", "another name under Result"),
    ("an --out on another disk", "a folder on another disk under Result"),
    ("--out ", "Result "),
    ("use --group-size ", "use groups of "),
    ("use --fp8", "use fp8"),
    ("--rtn or --fp8 need less", "rtn or fp8 need less"),
    ("--calib builtin makes one", "Calibrate makes one"),
    ("--backend cuda --device cpu runs", "localgen tui --backend cuda --device cpu runs"),
    ("change --seq-len", "localgen quantize --seq-len changes it"),
    ("a smaller --seq-len", "localgen quantize with a smaller --seq-len"),
    (
        "--device cpu, or fewer tokens at once with --seq-len",
        "localgen quantize --device cpu, or its --seq-len for fewer tokens at once",
    ),
)
_TABLE = dict(_SAID)
_OPTIONS = re.compile("|".join(re.escape(said) for said, _ in _SAID))


def on_screen(message: str) -> str:
    """The message for somebody who has a form and keys before him."""
    return _OPTIONS.sub(lambda found: _TABLE[found[0]], message)


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
            return numbers.percent(done / total if total else 1.0)
        return f"{self.at.unit.removesuffix('s')} {min(done + 1, total)} of {total}"

    @property
    def step(self) -> str:
        """What it does, and where in that it is."""
        return self.place if self.at is None else f"{self.at.step}, {self.place}"

    def line(self) -> str:
        """How it goes or went, in one line."""
        if self.is_running:
            left = "" if self.left_s is None else f", {numbers.clock(self.left_s)} left"
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
