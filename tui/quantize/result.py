"""Outcome of a quantization: the evaluated result, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.content import Content
from textual.widgets import Static

from localgen.backends.terminal_text import one_line
from localgen.quant.report import eval_table, verdict_lines
from localgen.quant.request.events import EvalEvent, EvalRow
from localgen.tui.quantize.run import QuantizeRun
from localgen.tui.widgets.numbers import format_bytes, format_duration_s

_NAME_COLUMNS, _VALUE_COLUMNS = 13, 11


class QuantizeResultPanel(Static):
    """Draws a run that has ended."""

    DEFAULT_CSS = """
    QuantizeResultPanel {
        height: auto; border: round $success; padding: 0 1; border-title-color: $success;
        border-title-style: bold; display: none;
    }
    QuantizeResultPanel.-failed { border: round $warning; border-title-color: $warning; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)

    def show_run(self, run: QuantizeRun) -> None:
        if run.result is not None:
            self.border_title = "Verdict"
        else:
            self.border_title = "Failed" if run.error else "Stopped"
        self.set_class(run.result is None, "-failed")
        self.update(Content("\n").join(_lines(run)))


def _lines(run: QuantizeRun) -> Iterable[Content]:
    if run.result is None:
        yield from _failure_lines(run)
        return
    yield Content.styled(f"✓ {one_line(run.result.path)}", "bold $success")
    if run.verdict is not None:
        yield Content("")
        yield from eval_table_lines(run.verdict.rows)
        for line in _verdict_note(run.verdict):
            yield Content.styled(one_line(line), "$muted")
    elif run.error:
        yield Content.styled(f"✗ not measured: {one_line(run.error)}", "$error")
    else:
        yield Content("The model is complete; stopped before it was measured.")
    yield Content("")
    yield Content.styled(_elapsed_line(run), "$muted")
    for note in run.notes:
        yield Content.styled(one_line(note), "$muted")


def _failure_lines(run: QuantizeRun) -> Iterable[Content]:
    if run.error:
        yield Content.styled(f"✗ {one_line(run.error)}", "$error")
        return
    stopped = run.stopped
    if stopped is None:
        yield Content("Stopped." if run.form.is_resumable else "Nothing was kept.")
    elif not stopped.can_resume:
        yield Content("Stopped before the first layer was done.")
    else:
        done = f"{stopped.done} of {stopped.total} {stopped.unit}"
        yield Content(f"{done} are done and can be resumed.")


def eval_table_lines(rows: Sequence[EvalRow]) -> Iterable[Content]:
    """The table of `localgen quantize`, transposed to one line per figure, as names are long."""
    head, *cells = eval_table(rows)
    titles = ("original", "result")
    yield Content.styled(
        " " * _NAME_COLUMNS + "".join(f"{title:<{_VALUE_COLUMNS}}" for title in titles),
        "bold $muted",
    )
    for name, *figures_of in zip(head[1:], *(row[1:] for row in cells), strict=True):
        parts = [figure.partition(" (") for figure in figures_of]
        yield _line(name if name == "KL" else name.lower(), [figure for figure, _, _ in parts])
        more = parts[-1][2].removesuffix(")")
        *change, bounds = more.split(", ") if " to " in more else (more, "")
        if any(change):
            yield _line("  change", ["", *change])
        if bounds:  # wider than a column
            yield _line("  95 %", [bounds])


def _verdict_note(verdict: EvalEvent) -> Iterable[str]:
    """What the figures rest on."""
    if verdict.rows[-1].kl_interval is None:
        return verdict_lines(verdict)
    return [f"95 % intervals, from {verdict.windows} sequences of text"]


def _line(name: str, cells: Sequence[str]) -> Content:
    text = "".join(f"{cell:<{_VALUE_COLUMNS}}" for cell in cells)
    return Content.assemble((f"{name:<{_NAME_COLUMNS}}", "$muted"), text.rstrip())


def _elapsed_line(run: QuantizeRun) -> str:
    took = f"took {format_duration_s(run.elapsed_s)}"
    made = run.result
    if made is None or made.layers is None:
        return took
    resumed = f", {made.resumed} resumed" if made.resumed else ""
    layers = f"{made.layers} layers in {format_duration_s(made.seconds)}"
    if made.estimated_s is not None:
        layers += f" ({format_duration_s(made.estimated_s)} estimated)"
    return (
        f"{took}: {layers}{resumed}; at most "
        f"{format_bytes(made.peak_bytes)} of memory, {format_bytes(made.estimated_bytes)} estimated"
    )
