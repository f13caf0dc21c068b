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
from localgen.backends.units import minutes, size
from localgen.cli import tables
from localgen.hub.quant_choice import room_here
from localgen.quant.advice import advice, recommended
from localgen.quant.events import At, Event, Made, Needs, Note, Stopped, Verdict
from localgen.quant.originals import original
from localgen.quant.report import Row, table

# without a terminal, a line this often
_LINE_S = 10.0


def show(model: str | None, *, as_json: bool) -> None:
    """Every way with what it needs, and the one to take. OutOfMemory: none fits."""
    name, folder = original(model)
    found = advice(folder, room_here())
    best = recommended(found)
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
            (one.option, size(one.size_bytes), size(one.need_bytes), one.place or "–", one.trade)
            for one in found
        ]
        for line in tables.aligned([head, *cells]):
            typer.echo(line)
    if best is None:
        least = found[-1]
        raise OutOfMemory(
            f"nothing of {name} fits: {least.option} would need {size(least.need_bytes)}"
        )
    tell(f"take {best.option}: localgen quantize {name} {best.option}")


class Steps:
    """A bar on a terminal with the time left, now and then a line elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = _bar(self._console) if self._console.is_terminal else None
        self._what = ""
        self._first = 0
        self._told_s = self._started_s = time.monotonic()
        self._task: Any = None
        if self._bar is not None:
            self._bar.start()

    def end(self) -> None:
        """Nothing more is drawn."""
        if self._bar is not None:
            self._bar.stop()

    def at(self, what: str, done: int, total: int, unit: str = "layers") -> None:
        """done: of `total` so far."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._first, self._started_s, self._told_s = what, done, now, now
            if self._bar is not None:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(one_line(what), total=total, completed=done)
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif now - self._told_s >= _LINE_S or done == total:
            self._told_s = now
            tell(f"{what}: {_count(done, unit)} of {_count(total, unit)}{self._left(done, total)}")

    def _left(self, done: int, total: int) -> str:
        done_here = done - self._first
        if not done_here or done == total:
            return ""
        left_s = (time.monotonic() - self._started_s) / done_here * (total - done)
        return f", {minutes(left_s)} left"


def tell(line: str) -> None:
    """Something that a user should know."""
    print(one_line(line), file=sys.stderr, flush=True)


def as_json(rows: Sequence[Row], **more: Any) -> str:
    """One object: the rows, and what else there is to say."""
    return tables.json_text({"models": [asdict(row) for row in rows]} | more, indent=2)


def _count(number: int, unit: str) -> str:
    return size(number) if unit == "bytes" else f"{number:,} {unit}"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
        console=console,
    )


class Printer:
    """Takes the events of one run. Used as a context, which ends the bar that is drawn."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._steps: Steps | None = None
        self._made: Made | None = None

    def __enter__(self) -> Printer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_steps()
        if kind is KeyboardInterrupt and self._made is not None:
            tell(
                f"{self._made.path} is whole, only not measured: "
                "localgen quantize --compare does that too"
            )

    def __call__(self, event: Event) -> None:
        """Print it."""
        if isinstance(event, At):
            self._at(event)
            return
        self._end_steps()
        match event:
            case Needs():
                _tell_needs(event)
            case Note(text):
                tell(text)
            case Made():
                self._made = event
                if event.layers is not None:
                    _tell_made(event)
            case Stopped(done, total):
                tell(
                    f"stopped after {done} of {total} layers: "
                    "the same command with --resume goes on from there"
                )
            case Verdict():
                self._show(event)

    def _at(self, event: At) -> None:
        if self._steps is None:
            self._steps = Steps()
        self._steps.at(event.step, event.done, event.total, event.unit)

    def _end_steps(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.end()

    def _show(self, verdict: Verdict) -> None:
        made = self._made
        if not self._as_json:
            for line in tables.aligned(table(verdict.rows)):
                typer.echo(line)
        elif made is None or made.layers is None:
            typer.echo(as_json(verdict.rows))
        else:
            names = ("layers", "layer_s", "peak_bytes", "estimated_bytes")
            typer.echo(as_json(verdict.rows, **{name: getattr(made, name) for name in names}))


def _tell_needs(needs: Needs) -> None:
    what = needs.what
    if needs.output_bytes is not None:
        what += f", {size(needs.source_bytes)} become about {size(needs.output_bytes)}"
    if needs.memory_bytes is None:
        tell(f"{needs.model}: {what}; up to {size(needs.disk_bytes)} of disk meanwhile")
        return
    states = needs.states_bytes
    tell(f"{needs.model}: {what}" + (f", activations of {size(states)} on disk" if states else ""))
    tell(
        f"needs about {size(needs.memory_bytes)} of memory ({size(needs.free_bytes)} free) and "
        f"{size(needs.disk_bytes)} of disk"
    )
    if needs.memory_bytes > needs.free_bytes:
        tell("that is more than is free now: end other programs, or it will swap")


def _tell_made(made: Made) -> None:
    resumed = f", {made.resumed} were there" if made.resumed else ""
    tell(
        f"{made.path}: {made.layers} layers in {minutes(made.seconds)}{resumed}, at most "
        f"{size(made.peak_bytes)} of memory (estimated {size(made.estimated_bytes)})"
    )
