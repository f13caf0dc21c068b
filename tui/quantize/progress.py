"""Progress of a running quantization: step, bar, remaining time, memory, latest notes."""

from __future__ import annotations

from collections.abc import Iterable

from textual.content import Content
from textual.widgets import Static

from localgen.backends.terminal_text import escape_name, one_line
from localgen.backends.units import format_count
from localgen.tui.gauges.plots import bar
from localgen.tui.quantize.run import QuantizeRun
from localgen.tui.widgets.alignment import align_ends
from localgen.tui.widgets.numbers import format_bytes, format_duration_s, format_percent

_NAME_COLUMNS = 10
_LATEST_NOTES = 6


class ProgressPanel(Static):
    """Draws a run; updates only when the text changes."""

    DEFAULT_CSS = """
    ProgressPanel {
        height: auto; border: round $primary; padding: 0 1; border-title-color: $primary;
        border-title-style: bold; display: none;
    }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.border_title = "Quantizing"
        self._shown_content = Content("")

    def show_run(self, run: QuantizeRun) -> None:
        drawing = Content("\n").join(_lines(run, self.content_size.width))
        if drawing.plain != self._shown_content.plain:
            self._shown_content = drawing
            self.update(drawing)


def _lines(run: QuantizeRun, width: int) -> Iterable[Content]:
    yield Content.styled(f"{escape_name(run.form.model)} → {escape_name(run.name)}", "bold")
    yield Content("")
    step = "stopping" if run.is_stopping else run.step_status
    remaining_s = run.remaining_s  # read once: the worker's thread may reset it
    left = "" if remaining_s is None else f"{format_duration_s(remaining_s)} left"
    yield align_ends(Content(one_line(step)), Content.styled(left, "bold"), width)
    share = (
        None
        if run.progress is None or not run.progress.total
        else run.progress.completed / run.progress.total
    )
    percent = format_percent(share) if share is not None else ""
    yield Content.assemble((bar(share, max(4, width - 5)), "$primary"), f"{percent:>5}")
    yield Content("")
    yield from _memory_lines(run)
    yield _line("elapsed", format_duration_s(run.elapsed_s))
    estimate = run.layers_estimate
    if estimate is not None and run.progress is not None and run.progress.step == estimate.step:
        layers = format_count(estimate.layers, "layer")
        yield _line("estimated", f"{format_duration_s(estimate.seconds)} for {layers}")
    for note in run.notes[-_LATEST_NOTES:]:
        yield Content.styled(one_line(note), "$muted")


def _memory_lines(run: QuantizeRun) -> Iterable[Content]:
    estimated = None if run.estimate is None else run.estimate.memory_bytes
    if estimated is None:  # llama.cpp quantizes one tensor at a time: no estimate
        return
    memory = run.memory_bytes()
    text = f"{format_bytes(memory)}, about {format_bytes(estimated)} at most"
    yield _line("memory", text)


def _line(name: str, text: str) -> Content:
    return Content.assemble((f"{name:<{_NAME_COLUMNS}}", "$muted"), text)
