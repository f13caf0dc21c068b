"""How long one waits: for the first token, and from each token to the next."""

from __future__ import annotations

from textual.content import Content

from localgen.client.snapshot import Latency
from localgen.tui.gauges.gauge import Gauge, history
from localgen.tui.gauges.samples import Latencies
from localgen.tui.widgets import numbers

_NAME, _LEAST, _MOST = 5, 9, 10


class LatencyGauge(Gauge[Latencies]):
    """The last one, the median and the 99th percentile; a minute of the last ones."""

    def __init__(self) -> None:
        super().__init__("Latency", id="latency")

    def frame(self, reading: Latencies) -> tuple[str, str]:
        """Which model it is of."""
        return reading.model, ""

    def lines(self, reading: Latencies, width: int, height: int) -> list[Content]:
        """The plots share what the table leaves."""
        rows = max(0, height - 3)
        # where there is no room for all three, the last one is the one that can be missed
        names = ("last", "p50", "p99") if width >= _NAME + 3 * _LEAST else ("p50", "p99")
        each = min(_MOST, (width - _NAME) // len(names))
        heading = " " * _NAME + "".join(f"{name:>{each}}" for name in names)
        return [
            Content.styled(heading, "$muted"),
            _row("TTFT", reading.ttft, names, each, "$accent"),
            *history(reading.ttft_ms, width, rows // 2, "$accent", numbers.duration),
            _row("ITL", reading.itl, names, each, "$primary"),
            *history(reading.itl_ms, width, (rows + 1) // 2, "$primary", numbers.duration),
        ]


def _row(name: str, latency: Latency, names: tuple[str, ...], each: int, style: str) -> Content:
    told = {"last": latency.last_ms, "p50": latency.p50_ms, "p99": latency.p99_ms}
    cells = [f"{numbers.duration(told[column]):>{each}}" for column in names]
    head = Content.assemble((f"{name:<{_NAME}}", "$muted"), (cells[0], f"bold {style}"))
    return Content.assemble(head, *cells[1:])
