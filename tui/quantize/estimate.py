"""Estimate of a quantization's size and memory, and the methods that fit this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from localgen.backends.terminal_text import one_line
from localgen.quant.request.events import (
    EstimateEvent,
    MethodEstimate,
    QuantizeEvent,
    RecommendationEvent,
    UnfinishedEvent,
    combine_estimates,
)
from localgen.tui.widgets.numbers import format_bytes, format_bytes_of

_NAME_COLUMNS = 10


@dataclass(frozen=True, slots=True)
class QuantizeEstimate:
    """Result of a dry run so far.

    is_complete: the dry run has finished. error: why it failed. option: the selected method as the
    recommendation names it.
    """

    option: str = ""
    resources: EstimateEvent | None = None
    unfinished: UnfinishedEvent | None = None
    recommendation: RecommendationEvent | None = None
    is_complete: bool = False
    error: str = ""

    @property
    def can_run(self) -> bool:
        """True if the run can be started."""
        return self.is_complete and not self.error


def apply_event(estimate: QuantizeEstimate, event: QuantizeEvent) -> QuantizeEstimate:
    """Return the estimate updated with an event of the dry run."""
    match event:
        case EstimateEvent():
            return replace(estimate, resources=combine_estimates(estimate.resources, event))
        case UnfinishedEvent():
            return replace(estimate, unfinished=event)
        case RecommendationEvent():
            return replace(estimate, recommendation=event)
    return estimate


class EstimatePanel(Static):
    """Draws a QuantizeEstimate."""

    DEFAULT_CSS = """
    EstimatePanel {
        height: auto; border: round $border; padding: 0 1; border-title-color: $primary;
        border-title-style: bold; text-wrap: wrap;
    }
    """
    estimate: reactive[QuantizeEstimate] = reactive(QuantizeEstimate, init=False)

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.border_title = "Estimate"

    def on_mount(self) -> None:
        self.watch_estimate()

    def on_resize(self) -> None:
        self.watch_estimate()

    def watch_estimate(self) -> None:
        width = self.content_size.width
        self.update(Content("\n").join(_lines(self.estimate, width)))


def _lines(estimate: QuantizeEstimate, width: int) -> Iterable[Content]:
    if estimate.error:
        yield Content.styled(f"✗ {one_line(estimate.error)}", "$error")
    elif not estimate.is_complete:
        yield Content.styled("estimating …", "$muted")
    if estimate.resources is not None:
        yield from _resource_lines(estimate.resources)
    if estimate.unfinished is not None:
        done, total = estimate.unfinished.done, estimate.unfinished.total
        yield Content.styled(
            f"▸ unfinished run, {done} of {total} layers done: Ctrl+R resumes it",
            "$accent",
        )
    if estimate.recommendation is not None:
        yield Content("")
        yield from _recommendation_lines(estimate.recommendation, estimate.option, width)


def _resource_lines(resources: EstimateEvent) -> Iterable[Content]:
    yield _line("result", format_bytes_of(resources.output_bytes, resources.source_bytes))
    memory = f"{format_bytes(resources.memory_bytes)}, {format_bytes(resources.free_bytes)} free"
    is_much = resources.memory_bytes is not None and resources.memory_bytes > resources.free_bytes
    yield _line("memory", memory, "$warning" if is_much else "")
    yield _line(
        "disk",
        f"{format_bytes(resources.disk_bytes)}, {format_bytes(resources.disk_free_bytes)} free",
    )
    if is_much:
        yield Content.styled(
            "! needs more memory than is free: close other programs, or it will swap", "$warning"
        )


def _recommendation_lines(
    recommendation: RecommendationEvent, option: str, width: int
) -> Iterable[Content]:
    ways = [(_option_label(way.option), way) for way in recommendation.estimates]
    name_width = max((len(name) for name, _ in ways), default=0)
    head = f"  {'METHOD':<{name_width}}  {'SIZE':>8}  FITS"
    yield Content.styled(head, "bold $muted")
    for name, way in ways:
        text = f"{name:<{name_width}}  {format_bytes(way.size_bytes):>8}  {way.place or 'no'}"
        if width - len(text) - 4 > len(way.trade):
            text = f"{text:<{len(head)}}  {way.trade}"
        is_chosen = way.option == option
        yield Content.styled(f"{'▸' if is_chosen else ' '} {text}", _option_style(way, is_chosen))
    if recommendation.best_option is not None:
        yield Content.styled(
            f"best for this machine: {_option_label(recommendation.best_option)}", "$muted"
        )
    else:
        yield Content.styled("none of these fits this machine", "$warning")


def _option_style(way: MethodEstimate, is_chosen: bool) -> str:
    if is_chosen:
        return "bold"
    return "" if way.place else "$muted"


def _option_label(option: str) -> str:
    return option.replace("--gguf", "GGUF").replace("--bits 3", "3 bits").replace("--", "")


def _line(name: str, text: str, style: str = "") -> Content:
    return Content.assemble((f"{name:<{_NAME_COLUMNS}}", "$muted"), (text, style))
