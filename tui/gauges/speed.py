"""The speed gauge: prefill and decode tokens/s, requests and batch size."""

from __future__ import annotations

from textual.content import Content

from localgen.tui.gauges.gauge import DEFAULT_SPAN, Gauge
from localgen.tui.gauges.samples import ThroughputSample
from localgen.tui.widgets.alignment import align_ends
from localgen.tui.widgets.numbers import format_integer, format_number, format_rate


class SpeedGauge(Gauge[ThroughputSample]):
    """Decode and prefill tokens/s with plots of a minute, request counts and batch size."""

    def __init__(self) -> None:
        super().__init__("Speed", id="speed")

    def border_texts(self, sample: ThroughputSample) -> tuple[str, str]:
        """How far the plots go back, if it is not a minute."""
        return "" if self.time_span == DEFAULT_SPAN else f"of {self.time_span}", ""

    def lines(self, sample: ThroughputSample, width: int, height: int) -> list[Content]:
        """Three lines of figures; both plots share the remaining rows."""
        rows = max(0, height - 3)
        decode = _line("decode", sample.decode_per_s, "$success")
        prefill = _line("prefill", sample.prefill_per_s, "$secondary")
        counts = Content.assemble(
            ("running ", "$muted"),
            (format_integer(sample.running), "bold"),
            ("  waiting ", "$muted"),
            (format_integer(sample.waiting), "bold $warning" if sample.waiting else "bold"),
        )
        batch = Content.assemble((format_number(sample.batch_size), "bold"), (" a step", "$muted"))
        return [
            decode,
            *self.series_plot(
                sample.decode_series,
                width,
                (rows + 1) // 2,
                "$success",
                format_rate,
            ),
            prefill,
            *self.series_plot(sample.prefill_series, width, rows // 2, "$secondary", format_rate),
            align_ends(counts, batch, width),
        ]


def _line(name: str, per_s: float | None, style: str) -> Content:
    return Content.assemble(
        (f"{name:<8}", "$muted"),
        (f"{format_rate(per_s):>7}", f"bold {style}"),
        (" tok/s", "$muted"),
    )
