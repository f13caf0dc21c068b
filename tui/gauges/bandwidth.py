"""How much of what memory can give is read: what limits decoding on most machines."""

from __future__ import annotations

from textual.content import Content

from localgen.backends.terminal_text import one_line
from localgen.tui.gauges.gauge import Gauge, history
from localgen.tui.gauges.plots import bar, spread
from localgen.tui.gauges.samples import BandwidthUse
from localgen.tui.widgets import numbers


class BandwidthGauge(Gauge[BandwidthUse]):
    """The share, the bytes, and a minute of the share."""

    def __init__(self) -> None:
        super().__init__("Memory bandwidth", id="bandwidth")

    def lines(self, reading: BandwidthUse, width: int, height: int) -> list[Content]:
        """What is not known is said in words."""
        if reading.limit_per_s is None:
            left = Content.assemble(("read ", "$muted"), (_rate(reading.read_per_s), "bold"))
            right = Content.styled("limit unknown", "$muted")
        else:
            percent = f"{numbers.percent(reading.share):>4}"
            left = Content.assemble((percent, "bold $success"), (" of the limit", "$muted"))
            right = Content(f"{numbers.part_of(reading.read_per_s, reading.limit_per_s)}/s")
        lines = [
            spread(left, right, width),
            Content.styled(bar(reading.share, width), "$success"),
        ]
        told = one_line(": ".join(part for part in (reading.medium, reading.why) if part))
        if told:
            lines.append(Content.styled(told, "$muted"))
        rows = height - len(lines)
        return [*lines, *history(reading.shares, width, rows, "$success", numbers.percent)]


def _rate(per_s: float | None) -> str:
    return numbers.UNKNOWN if per_s is None else f"{numbers.size(per_s)}/s"
