"""Terminal output of a quantization: progress and notices on stderr, the results on stdout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from localgen.backends.errors import OutOfMemory
from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_count, format_elapsed, format_size
from localgen.cli import tables
from localgen.hub.quant_choice import available_memory
from localgen.machine.decode_rates import fastest_by_use
from localgen.machine.step_times import step_times
from localgen.quant.advice import best_method, estimate_methods
from localgen.quant.originals import resolve_original
from localgen.quant.report import domain_table, eval_table, verdict_lines
from localgen.quant.request.events import (
    EstimateEvent,
    EvalEvent,
    FinishedEvent,
    LayersEstimateEvent,
    MixtureEvent,
    NoteEvent,
    ProgressEvent,
    QuantizeEvent,
    StoppedEvent,
)
from localgen.quant.request.step_eta import StepEta

# interval of progress lines without a terminal, of whole layers and within one
_LINE_INTERVAL_S, _PART_INTERVAL_S = 10.0, 60.0


def print_advice(model: str | None, *, as_json: bool) -> None:
    """Print the size, memory and speed of each method, and recommend one.

    Raises OutOfMemory if none fits.
    """
    name, folder = resolve_original(model)
    times = step_times(tables.print_notice)
    found = estimate_methods(folder, available_memory(), times)
    best = best_method(found)
    fastest = fastest_by_use({one.option: one.rates for one in found if one.place == "CPU"})
    if as_json:
        record = {
            "model": name,
            "ways": [asdict(one) for one in found],
            "recommended": best and best.option,
            "fastest": fastest,
        }
        typer.echo(tables.json_text(record, indent=2))
    else:
        uses = [use.upper() for use in fastest]
        head = ("OPTION", "SIZE", "NEEDS", "RUNS ON", *uses, "TRADE")
        cells = [
            (
                one.option,
                format_size(one.size_bytes),
                format_size(one.need_bytes),
                one.place or "–",
                *(tables.rate_cells(one.rates) if fastest else ()),
                one.trade,
            )
            for one in found
        ]
        for line in tables.align_columns([head, *cells]):
            typer.echo(line)
        for line in tables.rate_notes(fastest):
            typer.echo(line)
    if best is None:
        least = found[-1]
        raise OutOfMemory(
            f"no quantization of {name} fits: {least.option} needs {format_size(least.need_bytes)}"
        )
    tables.print_notice(f"recommended method {best.option}: localgen quantize {name} {best.option}")


class StepProgress:
    """A progress bar with the time left on a terminal, occasional lines otherwise."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._eta = StepEta()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            _TimeLeftColumn(self._eta),
        )
        is_terminal = self._console.is_terminal
        self._bar = Progress(*columns, console=self._console) if is_terminal else None
        self._step = ""
        self._last_line_s = time.monotonic()
        self._task: Any = None
        if self._bar is not None:
            self._bar.start()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(
        self, step: str, done: int, total: int, unit: str = "layers", current: float = 0.0
    ) -> None:
        """Show `done` of `total` units of a step; a new step name starts a new bar.

        current: fraction of the unit in progress. The time left is of whole ones: steps of learned
        rounding are no measure of the time that its other work takes.
        """
        now = time.monotonic()
        self._eta.update(step, done, total)
        if step != self._step:
            self._step, self._last_line_s = step, now
            if self._bar is not None:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(one_line(step), total=total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done + current)
            return
        interval_s = _PART_INTERVAL_S if current else _LINE_INTERVAL_S
        if now - self._last_line_s >= interval_s or done == total:
            self._last_line_s = now
            parts = (
                _format_progress(done, total, unit),
                f"{100 * current:.0f} % of the next {unit.removesuffix('s')}" if current else "",
                _format_left(self._eta),
            )
            tables.print_notice(f"{step}: {', '.join(part for part in parts if part)}")


class _TimeLeftColumn(ProgressColumn):
    def __init__(self, eta: StepEta) -> None:
        super().__init__()
        self._eta = eta

    def render(self, task: Task) -> Text:
        return Text(_format_left(self._eta))


def _format_left(eta: StepEta) -> str:
    """Empty if unknown, or if nothing is left."""
    left_s = eta.remaining_s()
    return f"{format_elapsed(left_s)} left" if left_s else ""


def verdict_json(verdict: EvalEvent, **extra: Any) -> str:
    """One JSON object with the rows as `models`, and the extra fields."""
    record = asdict(verdict)
    return tables.json_text({"models": record.pop("rows")} | record | extra, indent=2)


def _format_progress(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{format_size(done)} of {format_size(total)}"
    return f"{done:,} of {format_count(total, unit.removesuffix('s'))}"


class QuantizePrinter:
    """Event handler that prints one run; a context manager that stops the progress bar."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._progress: StepProgress | None = None
        self._result: FinishedEvent | None = None
        self._mixture: MixtureEvent | None = None
        self._notes: list[str] = []

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
            tables.print_notice(
                f"{self._result.path} is complete but not evaluated: "
                f"localgen quantize --compare ORIGINAL {self._result.path} evaluates it"
            )

    def __call__(self, event: QuantizeEvent) -> None:
        if isinstance(event, ProgressEvent):
            self._update_progress(event)
            return
        self._stop_progress()
        match event:
            case EstimateEvent():
                _print_requirements(event)
            case LayersEstimateEvent(step, layers, seconds):
                elapsed = format_elapsed(seconds)
                tables.print_notice(f"{step} {layers} layers takes about {elapsed}")
            case NoteEvent(text):
                self._notes.append(text)
                tables.print_notice(text)
            case FinishedEvent():
                self._result = event
                if event.layers is not None:
                    _print_result(event)
            case MixtureEvent():
                self._mixture = event
                _print_mixture(event)
            case StoppedEvent(done, total, unit) if event.can_resume:
                tables.print_notice(
                    f"stopped after {done} of {total} {unit}: "
                    "run the same command with --resume to continue"
                )
            case StoppedEvent():
                tables.print_notice("stopped before the first layer was done")
            case EvalEvent():
                self._print_verdict(event)

    def _update_progress(self, event: ProgressEvent) -> None:
        if self._progress is None:
            self._progress = StepProgress()
        self._progress.update(event.step, event.done, event.total, event.unit, event.current)

    def _stop_progress(self) -> None:
        steps, self._progress = self._progress, None
        if steps is not None:
            steps.stop()

    def _print_verdict(self, verdict: EvalEvent) -> None:
        made = self._result
        if not self._as_json:
            _print_verdict_tables(verdict)
        elif self._mixture is not None:
            typer.echo(verdict_json(verdict, mixture=asdict(self._mixture), notes=self._notes))
        elif made is None or made.layers is None:
            typer.echo(verdict_json(verdict, notes=self._notes))
        else:
            names = ("layers", "seconds", "estimated_s", "layer_s", "peak_bytes", "estimated_bytes")
            found = {name: getattr(made, name) for name in names}
            typer.echo(verdict_json(verdict, **found, notes=self._notes))


def _print_verdict_tables(verdict: EvalEvent) -> None:
    parts = [
        tables.align_columns(eval_table(verdict.rows)),
        tables.align_columns(domain_table(verdict.rows)),
        [one_line(line) for line in verdict_lines(verdict)],
    ]
    typer.echo("\n\n".join("\n".join(lines) for lines in parts if lines))


def _print_requirements(requirements: EstimateEvent) -> None:
    what = requirements.description
    if requirements.output_bytes is not None:
        output = format_size(requirements.output_bytes)
        what += f", {format_size(requirements.source_bytes)} to about {output}"
    if requirements.memory_bytes is None:
        disk = format_size(requirements.disk_bytes)
        tables.print_notice(f"{requirements.model}: {what}; needs up to {disk} of disk")
        return
    states = requirements.states_bytes
    tables.print_notice(
        f"{requirements.model}: {what}"
        + (f", activations of {format_size(states)} on disk" if states else "")
    )
    tables.print_notice(
        f"needs about {format_size(requirements.memory_bytes)} of memory "
        f"({format_size(requirements.free_bytes)} free) and "
        f"{format_size(requirements.disk_bytes)} of disk"
    )
    if requirements.memory_bytes > requirements.free_bytes:
        tables.print_notice(
            "more memory than is free: close other programs, or the system will swap"
        )


def _print_result(result: FinishedEvent) -> None:
    resumed = f", {result.resumed} from before" if result.resumed else ""
    took = format_elapsed(result.seconds)
    if result.estimated_s is not None:
        took += f" (estimated {format_elapsed(result.estimated_s)})"
    tables.print_notice(
        f"{result.path}: {result.layers} layers in {took}{resumed}, "
        f"peak memory {format_size(result.peak_bytes)} "
        f"(estimated {format_size(result.estimated_bytes)})"
    )


def _print_mixture(mixture: MixtureEvent) -> None:
    tables.print_notice(
        f"{format_size(mixture.size_bytes)} for {mixture.target}, predicted KL divergence "
        f"{mixture.predicted_kl:.4f}{' before GPTQ' if mixture.by_gptq else ''}; types by layer:"
    )
    width = max(map(len, mixture.types))
    for role, types in mixture.types.items():
        tables.print_notice(f"  {role:{width}}  {_by_layer(types)}")
    tables.print_notice(
        f"groups measured in {format_elapsed(mixture.probes_s)} (estimated "
        f"{format_elapsed(mixture.estimated_s)}), peak memory {format_size(mixture.peak_bytes)} "
        f"(estimated {format_size(mixture.estimated_bytes)})"
    )


def _by_layer(types: Sequence[str]) -> str:
    """Such as `Q5_K 0-1, IQ3_S 2-15`; the type alone if all have it."""
    if len(set(types)) == 1:
        return types[0]
    runs, first = [], 0
    for name, members in groupby(types):
        last = first + len(list(members)) - 1
        runs.append(f"{name} {first}" if first == last else f"{name} {first}-{last}")
        first = last + 1
    return ", ".join(runs)
