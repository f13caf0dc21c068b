"""Tokens a second, with what has to share them."""

from __future__ import annotations

from textual.content import Content

from localgen.tui.gauges.gauge import Gauge, history
from localgen.tui.gauges.plots import spread
from localgen.tui.gauges.samples import Rates
from localgen.tui.widgets import numbers


class SpeedGauge(Gauge[Rates]):
    """Decode and prefill with a minute of each, requests and the batch."""

    def __init__(self) -> None:
        super().__init__("Speed", id="speed")

    def lines(self, reading: Rates, width: int, height: int) -> list[Content]:
        """The plots share what the three lines of figures leave."""
        rows = max(0, height - 3)
        decode = _line("decode", reading.decode_per_s, "$success")
        prefill = _line("prefill", reading.prefill_per_s, "$secondary")
        counts = Content.assemble(
            ("running ", "$muted"),
            (numbers.count(reading.running), "bold"),
            ("  waiting ", "$muted"),
            (numbers.count(reading.waiting), "bold $warning" if reading.waiting else "bold"),
        )
        batch = Content.assemble((numbers.number(reading.batch), "bold"), (" a step", "$muted"))
        return [
            decode,
            *history(reading.decode, width, (rows + 1) // 2, "$success", numbers.rate),
            prefill,
            *history(reading.prefill, width, rows // 2, "$secondary", numbers.rate),
            spread(counts, batch, width),
        ]


def _line(name: str, per_s: float | None, style: str) -> Content:
    return Content.assemble(
        (f"{name:<8}", "$muted"),
        (f"{numbers.rate(per_s):>7}", f"bold {style}"),
        (" tok/s", "$muted"),
    )
