"""Latencies over the load, drawn."""

from __future__ import annotations

from collections.abc import Sequence

from localgen.backends.units import format_duration
from localgen.bench.estimates import percentile
from localgen.bench.load import Load
from localgen.bench.measured_request import MeasuredRequest
from localgen.bench.service_level import SHARE, ServiceLevel
from localgen.charts import Chart, Point, Series


def latency_chart(
    loads: Sequence[Load], level: ServiceLevel, goodput: float | None
) -> Chart | None:
    """TTFT and TPOT of 95 % of the answered requests over the rate, or over the requests at once.

    loads: by rising load. level: its goals are drawn as lines. goodput: a rate to be marked.
    None for fewer than two loads of a kind.
    """
    rates: dict[float, list[MeasuredRequest]] = {}
    numbers: dict[float, list[MeasuredRequest]] = {}
    for load in loads:
        if load.rate and load.answered:
            rates.setdefault(load.rate, []).extend(load.answered)
        elif load.concurrency and load.answered:
            numbers.setdefault(load.concurrency, []).extend(load.answered)
    drawn = rates if len(rates) > 1 else numbers
    if len(drawn) < 2:
        return None
    ttft = [(x, _p95([r.ttft_s for r in answered])) for x, answered in drawn.items()]
    tpot = [
        (x, _p95([r.tpot_s for r in answered if r.completion_tokens > 1]))
        for x, answered in drawn.items()
    ]
    xs = list(drawn)
    series = [
        Series("TTFT", _positive(ttft)),
        Series("TPOT", _positive(tpot)),
        Series("TTFT goal", [(x, level.ttft_s * 1e3) for x in (xs[0], xs[-1])]),
        Series("TPOT goal", [(x, level.tpot_s * 1e3) for x in (xs[0], xs[-1])]),
    ]
    title = "requests/s" if len(rates) > 1 else "requests at once"
    if goodput in rates:
        at = [(x, y) for x, y in ttft if x == goodput]
        series.append(Series("goodput", _positive(at), "◆"))
        title += "   ◆ goodput"
    return Chart(
        series=[one for one in series if one.points],
        x_title=title,
        y_title="95 % of the answered requests are within",
        format_x=lambda x: f"{x:.3g}",
        format_y=format_duration,
    )


def _p95(seconds: list[float]) -> float:
    """In milliseconds; 0 without any."""
    return percentile(seconds, SHARE) * 1e3 if seconds else 0.0


def _positive(points: list[Point]) -> list[Point]:
    return [(x, y) for x, y in points if y > 0]
