"""The memory bandwidth gauge. Bandwidth limits decoding on most machines."""

from __future__ import annotations

from textual.content import Content

from localgen.backends.terminal_text import one_line
from localgen.tui.gauges.gauge import Gauge
from localgen.tui.gauges.plots import bar
from localgen.tui.gauges.samples import BandwidthSample
from localgen.tui.widgets.alignment import align_ends
from localgen.tui.widgets.numbers import UNKNOWN_TEXT, format_bytes, format_bytes_of, format_percent


class BandwidthGauge(Gauge[BandwidthSample]):
    """Bandwidth utilization, bytes per second, and a plot of the last minute."""

    def __init__(self) -> None:
        super().__init__("Memory bandwidth", id="bandwidth")

    def lines(self, sample: BandwidthSample, width: int, height: int) -> list[Content]:
        """The figures, why one is unknown, and the plot in the remaining rows."""
        if sample.limit_bytes_per_s is None:
            left = Content.assemble(
                ("read ", "$muted"), (_format_bytes_per_s(sample.read_bytes_per_s), "bold")
            )
            right = Content.styled("limit unknown", "$muted")
        else:
            percent = f"{format_percent(sample.utilization):>4}"
            left = Content.assemble((percent, "bold $success"), (" of the limit", "$muted"))
            right = Content(
                f"{format_bytes_of(sample.read_bytes_per_s, sample.limit_bytes_per_s)}/s"
            )
        lines = [
            align_ends(left, right, width),
            Content.styled(bar(sample.utilization, width), "$success"),
        ]
        source = one_line(": ".join(part for part in (sample.medium, sample.reason) if part))
        if source:
            lines.append(Content.styled(source, "$muted"))
        rows = height - len(lines)
        return [
            *lines,
            *self.series_plot(sample.utilization_series, width, rows, "$success", format_percent),
        ]


def _format_bytes_per_s(per_s: float | None) -> str:
    return UNKNOWN_TEXT if per_s is None else f"{format_bytes(per_s)}/s"
