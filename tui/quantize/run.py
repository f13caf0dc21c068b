"""A quantization run in the background, independent of the screen shown."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from localgen.backends.errors import LocalgenError
from localgen.quant.process import QuantizeWorker
from localgen.quant.request.events import (
    EstimateEvent,
    EvalEvent,
    FinishedEvent,
    LayersEstimateEvent,
    NoteEvent,
    ProgressEvent,
    QuantizeEvent,
    StoppedEvent,
    combine_estimates,
)
from localgen.quant.request.form import QuantizeForm
from localgen.quant.request.step_eta import StepEta
from localgen.tui.widgets.numbers import format_duration_s, format_percent

# the screen has fields and keys for some options; the others are named with their command
_CLI_TO_TUI = (
    ("run again with --resume", "press Ctrl+R to resume"),
    ("--resume continues", "Ctrl+R continues"),
    ("another --out", "another name under Result"),
    ("an --out on another disk", "a folder on another disk under Result"),
    ("--out ", "Result "),
    ("use --group-size ", "use groups of "),
    ("use --fp8", "use fp8"),
    ("--rtn or --fp8 need less", "rtn or fp8 need less"),
    ("--rounding-steps 0", "Rounding set to plain"),
    ("--target-size", "auto SIZE"),
    ("--target-bpw", "auto BITS bits"),
    ("--target-kl", "auto KL"),
    ("leave out --no-eval", "set Measure to yes"),
    ("use --gguf ", "use GGUF "),
    ("add --calib builtin", "set Calibrate"),
    ("--gptq cannot choose", "gptq cannot choose"),
    ("use --calib or --awq with it", "set Calibrate to matrix or matrix+awq"),
    ("--backend cuda --device cpu runs", "localgen tui --backend cuda --device cpu runs"),
    ("change --seq-len", "localgen quantize --seq-len changes it"),
    ("a smaller --seq-len", "localgen quantize with a smaller --seq-len"),
    (
        "--device cpu, or fewer tokens at once with --seq-len",
        "localgen quantize --device cpu, or its --seq-len for fewer tokens at once",
    ),
)
_REPLACEMENTS = dict(_CLI_TO_TUI)
_CLI_PATTERN = re.compile("|".join(re.escape(text) for text, _ in _CLI_TO_TUI))


def replace_cli_options(message: str) -> str:
    """Replace command line options in a message by the screen's fields and keys."""
    return _CLI_PATTERN.sub(lambda found: _REPLACEMENTS[found[0]], message)


_MEMORY_POLL_S = 1.0


class QuantizeRun:
    """State of one run, updated from the worker's events by a background thread, its only writer.

    error: why it failed. ended: set last.
    """

    def __init__(
        self, form: QuantizeForm, worker: QuantizeWorker, clock: Callable[[], float]
    ) -> None:
        self.form = form
        self.name = form.output_path.name
        self.estimate: EstimateEvent | None = None
        self.progress: ProgressEvent | None = None
        self.layers_estimate: LayersEstimateEvent | None = None
        self.notes: tuple[str, ...] = ()
        self.result: FinishedEvent | None = None
        self.verdict: EvalEvent | None = None
        self.stopped: StoppedEvent | None = None
        self.error = ""
        self.ended = threading.Event()
        self.is_stopping = False
        self._worker, self._clock = worker, clock
        self._started_s = clock()
        self._ended_s: float | None = None
        self._memory_bytes: int | None = None
        self._memory_polled_s = float("-inf")
        self._eta = StepEta(clock)
        self._thread = threading.Thread(target=self._consume_events, name="quantize", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Request a stop without waiting for it; finished layers are kept. `ended` is set later."""
        self.is_stopping = True
        self._worker.stop()

    @property
    def is_running(self) -> bool:
        return not self.ended.is_set()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, up to the end."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._started_s

    @property
    def remaining_s(self) -> float | None:
        """Remaining time of the current step, or None if unknown."""
        return self._eta.remaining_s()

    def memory_bytes(self) -> int | None:
        """Memory of the worker process, polled once a second."""
        if self._clock() - self._memory_polled_s >= _MEMORY_POLL_S:
            self._memory_polled_s = self._clock()
            self._memory_bytes = self._worker.memory_bytes()
        return self._memory_bytes

    @property
    def step_position(self) -> str:
        """Progress within the step: `layer 3 of 8`, `45%`."""
        if self.progress is None:
            return "starting"
        done, total = self.progress.done, self.progress.total
        if self.progress.unit == "bytes":
            return format_percent(done / total if total else 1.0)
        return f"{self.progress.unit.removesuffix('s')} {min(done + 1, total)} of {total}"

    @property
    def step_status(self) -> str:
        """Step and progress within it."""
        return (
            self.step_position
            if self.progress is None
            else f"{self.progress.step}, {self.step_position}"
        )

    def status_line(self) -> str:
        """Progress or outcome in one line."""
        if self.is_running:
            remaining_s = self.remaining_s  # read once: the worker's thread may reset it
            left = "" if remaining_s is None else f", {format_duration_s(remaining_s)} left"
            is_layer = self.progress is not None and self.progress.unit == "layers"
            where = f"{self.step_position if is_layer else self.step_status}{left}"
            return f"quantizing {self.name}: {'stopping' if self.is_stopping else where}"
        if self.result is not None:
            return f"{self.name} is ready"
        if self.error:
            return f"quantizing {self.name} failed: {self.error}"
        return f"quantizing {self.name} was stopped"

    def _consume_events(self) -> None:
        try:
            for event in self._worker.events():
                self._apply_event(event)
        except LocalgenError as error:
            self.error = replace_cli_options(error.message)
        except Exception as error:  # report it; the chats must keep running
            self.error = f"internal error ({type(error).__name__}: {error})"
        finally:
            self._worker.kill()
            self._ended_s = self._clock()
            self.ended.set()

    def _apply_event(self, event: QuantizeEvent) -> None:
        match event:
            case EstimateEvent():
                self.estimate = combine_estimates(self.estimate, event)
            case ProgressEvent(step, done, total):
                self.progress = event
                self._eta.update(step, done, total)
            case LayersEstimateEvent():
                self.layers_estimate = event
            case NoteEvent(text):
                self.notes = (*self.notes, replace_cli_options(text))
            case FinishedEvent():
                self.result = event
            case EvalEvent():
                self.verdict = event
            case StoppedEvent():
                self.stopped = event
