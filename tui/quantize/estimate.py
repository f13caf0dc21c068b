"""What a quantization would take, beside what there is, and which ways suit the machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from localgen.backends.terminal_text import one_line
from localgen.quant.events import Advice, Advised, Event, Needs, Unfinished, both
from localgen.tui.widgets import numbers

_NAME_COLUMNS = 10


@dataclass(frozen=True, slots=True)
class Reckoning:
    """What a look has told so far. is_whole: it has come to its end. error: why it could not.
    option: what is chosen, as advice calls it."""

    option: str = ""
    needs: Needs | None = None
    unfinished: Unfinished | None = None
    advised: Advised | None = None
    is_whole: bool = False
    error: str = ""

    @property
    def is_possible(self) -> bool:
        """Whether the run can begin."""
        return self.is_whole and not self.error


def with_event(reckoning: Reckoning, event: Event) -> Reckoning:
    """What is known after one more event."""
    match event:
        case Needs():
            return replace(reckoning, needs=both(reckoning.needs, event))
        case Unfinished():
            return replace(reckoning, unfinished=event)
        case Advised():
            return replace(reckoning, advised=event)
    return reckoning


class EstimatePanel(Static):
    """Draws a reckoning."""

    DEFAULT_CSS = """
    EstimatePanel {
        height: auto; border: round $border; padding: 0 1; border-title-color: $primary;
        border-title-style: bold; text-wrap: wrap;
    }
    """
    reckoning: reactive[Reckoning] = reactive(Reckoning, init=False)

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.border_title = "About what it takes"

    def on_mount(self) -> None:
        self.watch_reckoning()

    def on_resize(self) -> None:
        self.watch_reckoning()

    def watch_reckoning(self) -> None:
        width = self.content_size.width
        self.update(Content("\n").join(_lines(self.reckoning, width)))


def _lines(reckoning: Reckoning, width: int) -> Iterable[Content]:
    if reckoning.error:
        yield Content.styled(f"✗ {one_line(reckoning.error)}", "$error")
    elif not reckoning.is_whole:
        yield Content.styled("reckoning …", "$muted")
    if reckoning.needs is not None:
        yield from _need_lines(reckoning.needs)
    if reckoning.unfinished is not None:
        done, total = reckoning.unfinished.done, reckoning.unfinished.total
        yield Content.styled(
            f"▸ an unfinished run lies there, {done} of {total} layers: Ctrl+R goes on with it",
            "$accent",
        )
    if reckoning.advised is not None:
        yield Content("")
        yield from _advice_lines(reckoning.advised, reckoning.option, width)


def _need_lines(needs: Needs) -> Iterable[Content]:
    yield _line("result", numbers.part_of(needs.output_bytes, needs.source_bytes))
    memory = f"{numbers.size(needs.memory_bytes)}, {numbers.size(needs.free_bytes)} free"
    is_much = needs.memory_bytes is not None and needs.memory_bytes > needs.free_bytes
    yield _line("memory", memory, "$warning" if is_much else "")
    yield _line(
        "disk", f"{numbers.size(needs.disk_bytes)}, {numbers.size(needs.disk_free_bytes)} free"
    )
    if is_much:
        yield Content.styled(
            "! more memory than is free now: end other programs, or it will swap", "$warning"
        )


def _advice_lines(advised: Advised, option: str, width: int) -> Iterable[Content]:
    ways = [(_words(way.option), way) for way in advised.ways]
    name_width = max((len(name) for name, _ in ways), default=0)
    head = f"  {'WAY':<{name_width}}  {'SIZE':>8}  FITS"
    yield Content.styled(head, "bold $muted")
    for name, way in ways:
        text = f"{name:<{name_width}}  {numbers.size(way.size_bytes):>8}  {way.place or 'no'}"
        if width - len(text) - 4 > len(way.trade):
            text = f"{text:<{len(head)}}  {way.trade}"
        is_chosen = way.option == option
        yield Content.styled(f"{'▸' if is_chosen else ' '} {text}", _style(way, is_chosen))
    if advised.best is not None:
        yield Content.styled(f"suits this machine best: {_words(advised.best)}", "$muted")
    else:
        yield Content.styled("none of these fits this machine", "$warning")


def _style(way: Advice, is_chosen: bool) -> str:
    if is_chosen:
        return "bold"
    return "" if way.place else "$muted"


def _words(option: str) -> str:
    return option.replace("--gguf", "GGUF").replace("--bits 3", "3 bits").replace("--", "")


def _line(name: str, text: str, style: str = "") -> Content:
    return Content.assemble((f"{name:<{_NAME_COLUMNS}}", "$muted"), (text, style))
