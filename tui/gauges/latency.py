"""How long one waits: for the first token, and from each token to the next."""

from __future__ import annotations

from textual.content import Content

from localgen.client.snapshot import Latency
from localgen.tui import figures
from localgen.tui.gauges.gauge import Gauge, history
from localgen.tui.gauges.readings import Latencies

_NAME, _MOST = 5, 10


class LatencyGauge(Gauge[Latencies]):
    """The last one, the median and the 99th percentile; a minute of the last ones."""

    def __init__(self) -> None:
        super().__init__("Latency", id="latency")

    def lines(self, reading: Latencies, width: int, height: int) -> list[Content]:
        """The plots share what the table leaves."""
        rows = max(0, height - 3)
        each = min(_MOST, (width - _NAME) // 3)
        heading = " " * _NAME + "".join(f"{name:>{each}}" for name in ("last", "p50", "p99"))
        return [
            Content.styled(heading, "$muted"),
            _row("TTFT", reading.ttft, each, "$accent"),
            *history(reading.ttft_ms, width, rows // 2, "$accent"),
            _row("ITL", reading.itl, each, "$primary"),
            *history(reading.itl_ms, width, (rows + 1) // 2, "$primary"),
        ]


def _row(name: str, latency: Latency, each: int, style: str) -> Content:
    return Content.assemble(
        (f"{name:<{_NAME}}", "$muted"),
        (f"{figures.duration(latency.last_ms):>{each}}", f"bold {style}"),
        f"{figures.duration(latency.p50_ms):>{each}}",
        f"{figures.duration(latency.p99_ms):>{each}}",
    )
