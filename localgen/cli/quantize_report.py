"""The events of a quantization, printed: progress and remarks on stderr, the verdict on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from localgen.backends.errors import OutOfMemory
from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_elapsed, format_size
from localgen.cli import tables
from localgen.hub.quant_choice import available_memory
from localgen.quant.advice import best_method, estimate_methods
from localgen.quant.events import (
    EstimateEvent,
    EvalEvent,
    FinishedEvent,
    NoteEvent,
    ProgressEvent,
    QuantizeEvent,
    StoppedEvent,
)
from localgen.quant.originals import resolve_original
from localgen.quant.report import EvalRow, eval_table

# without a terminal, a line this often
_LINE_INTERVAL_S = 10.0


def print_advice(model: str | None, *, as_json: bool) -> None:
    """Every way with what it needs, and the one to take. OutOfMemory: none fits."""
    name, folder = resolve_original(model)
    found = estimate_methods(folder, available_memory())
    best = best_method(found)
    if as_json:
        record = {
            "model": name,
            "ways": [asdict(one) for one in found],
            "recommended": best and best.option,
        }
        typer.echo(tables.json_text(record, indent=2))
    else:
        head = ("OPTION", "SIZE", "NEEDS", "RUNS ON", "TRADE")
        cells = [
            (
                one.option,
                format_size(one.size_bytes),
                format_size(one.need_bytes),
                one.place or "–",
                one.trade,
            )
            for one in found
        ]
        for line in tables.align_columns([head, *cells]):
            typer.echo(line)
    if best is None:
        least = found[-1]
        raise OutOfMemory(
            f"nothing of {name} fits: {least.option} would need {format_size(least.need_bytes)}"
        )
    print_notice(f"take {best.option}: localgen quantize {name} {best.option}")


class StepProgress:
    """A bar on a terminal with the time left, now and then a line elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = _create_bar(self._console) if self._console.is_terminal else None
        self._step = ""
        self._initial = 0
        self._last_line_s = self._started_s = time.monotonic()
        self._task: Any = None
        if self._bar is not None:
            self._bar.start()

    def stop(self) -> None:
        """Nothing more is drawn."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: str, done: int, total: int, unit: str = "layers") -> None:
        """done: of `total` so far."""
        now = time.monotonic()
        if step != self._step:
            self._step, self._initial, self._started_s, self._last_line_s = step, done, now, now
            if self._bar is not None:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(one_line(step), total=total, completed=done)
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif now - self._last_line_s >= _LINE_INTERVAL_S or done == total:
            self._last_line_s = now
            print_notice(
                f"{step}: {_format_amount(done, unit)} of {_format_amount(total, unit)}"
                f"{self._time_left(done, total)}"
            )

    def _time_left(self, done: int, total: int) -> str:
        done_here = done - self._initial
        if not done_here or done == total:
            return ""
        left_s = (time.monotonic() - self._started_s) / done_here * (total - done)
        return f", {format_elapsed(left_s)} left"


def print_notice(line: str) -> None:
    """Something that a user should know."""
    print(one_line(line), file=sys.stderr, flush=True)


def verdict_json(rows: Sequence[EvalRow], **extra: Any) -> str:
    """One object: the rows, and what else there is to say."""
    return tables.json_text({"models": [asdict(row) for row in rows]} | extra, indent=2)


def _format_amount(number: int, unit: str) -> str:
    return format_size(number) if unit == "bytes" else f"{number:,} {unit}"


def _create_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
        console=console,
    )


class QuantizePrinter:
    """Takes the events of one run. Used as a context, which ends the bar that is drawn."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._progress: StepProgress | None = None
        self._result: FinishedEvent | None = None

    def __enter__(self) -> QuantizePrinter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_progress()
        if kind is KeyboardInterrupt and self._result is not None:
            print_notice(
                f"{self._result.path} is whole, only not measured: "
                "localgen quantize --compare does that too"
            )

    def __call__(self, event: QuantizeEvent) -> None:
        """Print it."""
        if isinstance(event, ProgressEvent):
            self._update_progress(event)
            return
        self._stop_progress()
        match event:
            case EstimateEvent():
                _print_requirements(event)
            case NoteEvent(text):
                print_notice(text)
            case FinishedEvent():
                self._result = event
                if event.layers is not None:
                    _print_result(event)
            case StoppedEvent(done, total):
                print_notice(
                    f"stopped after {done} of {total} layers: "
                    "the same command with --resume goes on from there"
                )
            case EvalEvent():
                self._print_verdict(event)

    def _update_progress(self, event: ProgressEvent) -> None:
        if self._progress is None:
            self._progress = StepProgress()
        self._progress.update(event.step, event.done, event.total, event.unit)

    def _stop_progress(self) -> None:
        steps, self._progress = self._progress, None
        if steps is not None:
            steps.stop()

    def _print_verdict(self, verdict: EvalEvent) -> None:
        made = self._result
        if not self._as_json:
            for line in tables.align_columns(eval_table(verdict.rows)):
                typer.echo(line)
        elif made is None or made.layers is None:
            typer.echo(verdict_json(verdict.rows))
        else:
            names = ("layers", "layer_s", "peak_bytes", "estimated_bytes")
            typer.echo(verdict_json(verdict.rows, **{name: getattr(made, name) for name in names}))


def _print_requirements(requirements: EstimateEvent) -> None:
    what = requirements.description
    if requirements.output_bytes is not None:
        output = format_size(requirements.output_bytes)
        what += f", {format_size(requirements.source_bytes)} become about {output}"
    if requirements.memory_bytes is None:
        disk = format_size(requirements.disk_bytes)
        print_notice(f"{requirements.model}: {what}; up to {disk} of disk meanwhile")
        return
    states = requirements.states_bytes
    print_notice(
        f"{requirements.model}: {what}"
        + (f", activations of {format_size(states)} on disk" if states else "")
    )
    print_notice(
        f"needs about {format_size(requirements.memory_bytes)} of memory "
        f"({format_size(requirements.free_bytes)} free) and "
        f"{format_size(requirements.disk_bytes)} of disk"
    )
    if requirements.memory_bytes > requirements.free_bytes:
        print_notice("that is more than is free now: end other programs, or it will swap")


def _print_result(result: FinishedEvent) -> None:
    resumed = f", {result.resumed} were there" if result.resumed else ""
    print_notice(
        f"{result.path}: {result.layers} layers in {format_elapsed(result.seconds)}{resumed}, "
        f"at most {format_size(result.peak_bytes)} of memory "
        f"(estimated {format_size(result.estimated_bytes)})"
    )
