"""The events of a quantization, printed: progress and remarks on stderr, the verdict on stdout."""

from __future__ import annotations

from types import TracebackType

import typer

from localgen.chats.report import size
from localgen.cli import tables
from localgen.cli.quantize_report import Steps, as_json, minutes, tell
from localgen.quant.events import At, Event, Made, Needs, Note, Stopped, Verdict
from localgen.quant.report import table


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
