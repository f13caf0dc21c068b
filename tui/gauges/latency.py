"""The latency gauge: time to first token (TTFT) and inter-token latency (ITL)."""

from __future__ import annotations

from textual.content import Content

from localgen.client.snapshot import LatencyStats
from localgen.tui.gauges.gauge import Gauge
from localgen.tui.gauges.samples import LatencySample
from localgen.tui.widgets.numbers import format_duration_ms

_NAME_COLUMNS, _MIN_COLUMNS, _MAX_COLUMNS = 5, 9, 10


class LatencyGauge(Gauge[LatencySample]):
    """Last value, median and 99th percentile, and a plot of the last values over a minute."""

    def __init__(self) -> None:
        super().__init__("Latency", id="latency")

    def border_texts(self, sample: LatencySample) -> tuple[str, str]:
        """The model measured."""
        return f"of {sample.model}" if sample.model else "", ""

    def lines(self, sample: LatencySample, width: int, height: int) -> list[Content]:
        """The table; both plots share the remaining rows."""
        rows = max(0, height - 3)
        # too narrow for three columns: drop "last"
        names = (
            ("last", "p50", "p99") if width >= _NAME_COLUMNS + 3 * _MIN_COLUMNS else ("p50", "p99")
        )
        each = min(_MAX_COLUMNS, (width - _NAME_COLUMNS) // len(names))
        heading = " " * _NAME_COLUMNS + "".join(f"{name:>{each}}" for name in names)
        return [
            Content.styled(heading, "$muted"),
            _row("TTFT", sample.ttft, names, each, "$accent"),
            *self.series_plot(
                sample.ttft_series_ms,
                width,
                rows // 2,
                "$accent",
                format_duration_ms,
                dots=True,
            ),
            _row("ITL", sample.itl, names, each, "$primary"),
            *self.series_plot(
                sample.itl_series_ms,
                width,
                (rows + 1) // 2,
                "$primary",
                format_duration_ms,
            ),
        ]


def _row(
    name: str, latency: LatencyStats, names: tuple[str, ...], each: int, style: str
) -> Content:
    values = {"last": latency.last_ms, "p50": latency.p50_ms, "p99": latency.p99_ms}
    cells = [f"{format_duration_ms(values[column]):>{each}}" for column in names]
    head = Content.assemble((f"{name:<{_NAME_COLUMNS}}", "$muted"), (cells[0], f"bold {style}"))
    return Content.assemble(head, *cells[1:])
