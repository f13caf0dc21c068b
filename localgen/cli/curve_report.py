"""Rooflines as a chart and tables, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from localgen.backends.units import format_count, format_rate, format_size
from localgen.charts import Series, log_chart
from localgen.cli import tables
from localgen.planning.curves import ModelCurve
from localgen.planning.roofline import Roofline, expected_tokens, speculative_speedup

_CHART_ROWS = 16
_MIN_REQUESTS, _MAX_REQUESTS = 16, 1024
_POINTS_PER_DOUBLING = 4
_CONTEXTS = (1024, 4096, 16_384, 32_768, 131_072)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
DRAFTS = (1, 2, 3, 4, 6, 8)

MeasuredPoint = tuple[int, float]


def curves_text(curves: Sequence[ModelCurve], measured: Sequence[MeasuredPoint], width: int) -> str:
    """The chart, the figures of each curve, and tokens per pass of speculation.

    measured: requests at once and their tokens/s together. width: of the terminal in columns.
    """
    parts = [
        _chart(curves, measured, width),
        *(_curve_lines(one.roofline, _label(one.roofline, curves)) for one in curves),
        _speculation_lines(curves[0]),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def curves_json(curves: Sequence[ModelCurve], measured: Sequence[MeasuredPoint]) -> str:
    """One JSON object: `curves`, `speculation` and `measured`."""
    record = {
        "curves": [_record(one.roofline) for one in curves],
        "speculation": [_speculation_record(one) for one in curves],
        "measured": [{"requests": count, "tokens_per_s": rate} for count, rate in measured],
    }
    return tables.json_text(record, indent=2)


def _label(line: Roofline, curves: Sequence[ModelCurve]) -> str:
    """The device, and the model where several are drawn."""
    several = len({one.roofline.name for one in curves}) > 1
    quant = line.name.rpartition(":")[2]
    return f"{line.device.name} {quant}" if several else line.device.name


def _chart(
    curves: Sequence[ModelCurve], measured: Sequence[MeasuredPoint], width: int
) -> Iterator[str]:
    lines = [one.roofline for one in curves if one.roofline.fits]
    names = ", ".join(dict.fromkeys(one.roofline.name for one in curves))
    yield f"{names}: at most so many tokens/s, with {curves[0].roofline.ctx:,} tokens of context"
    yield ""
    last = _last_count(lines, measured)
    drawn = [
        Series(_label(line, curves), _points(line, min(last, line.max_requests))) for line in lines
    ]
    ridges = [
        (line.ridge, line.tokens_per_s(line.ridge))
        for line in lines
        if line.ridge is not None and line.ridge <= min(last, line.max_requests)
    ]
    drawn.append(Series("ridge", ridges, "◆"))
    drawn.append(Series("measured", measured, "●"))
    yield from log_chart(
        drawn,
        width,
        _CHART_ROWS,
        x_title=_x_title(bool(ridges), bool(measured)),
        y_title="tokens/s of all requests together",
        format_x=lambda count: f"{count:,.0f}",
        format_y=_short_number,
    )


def _x_title(has_ridge: bool, has_measured: bool) -> str:
    marks = ["◆ ridge: from here on computing limits, not memory"] * has_ridge
    marks += ["● measured"] * has_measured
    return "   ".join(["requests at once", *marks])


def _last_count(lines: Sequence[Roofline], measured: Sequence[MeasuredPoint]) -> int:
    """Requests at the right edge of the chart: twice the largest ridge, within bounds."""
    ridges = [line.ridge for line in lines if line.ridge is not None]
    wanted = max([_MIN_REQUESTS, *(2 * ridge for ridge in ridges), *(n for n, _ in measured)])
    return min(_MAX_REQUESTS, wanted if len(ridges) == len(lines) else _MAX_REQUESTS)


def _points(line: Roofline, last: int) -> list[tuple[float, float]]:
    counts = [
        2 ** (step / _POINTS_PER_DOUBLING)
        for step in range(int(last).bit_length() * _POINTS_PER_DOUBLING)
    ]
    return [(n, line.tokens_per_s(n)) for n in [*(n for n in counts if n < last), float(last)]]


def _curve_lines(line: Roofline, label: str) -> Iterator[str]:
    device = line.device
    yield f"{label}: {_device_text(line)}"
    if not line.fits:
        yield (
            f"does not fit: its weights take {format_size(line.costs.weights_bytes)}, "
            f"a request of {line.ctx:,} tokens {format_size(line.costs.token_bytes * line.ctx)}, "
            f"{format_size(device.free_bytes * device.count)} are there"
        )
        return
    yield _ridge_sentence(line)
    yield ""
    priced = device.price is not None
    head = ("REQUESTS", "TOKENS/S", "EACH", "LIMIT", "KV SHARE", *(("PER MILLION",) * priced))
    yield from tables.align_columns([head, *(_row(line, n) for n in _row_counts(line))])
    yield ""
    head = ("CONTEXT", "KV CACHE", "KV SHARE OF ONE", "REQUESTS THAT FIT", "TOKENS/S OF THESE")
    yield from tables.align_columns([head, *map(_context_row, _at_contexts(line))])


def _device_text(line: Roofline) -> str:
    device = line.device
    peak = f", {device.flops / 1e12:,.3g} TFLOP/s" if device.flops else ""
    each = " each" if device.count > 1 else ""
    return f"{device.bytes_per_s / 1e9:,.4g} GB/s{peak}{each} ({device.source})"


def _ridge_sentence(line: Roofline) -> str:
    if line.ridge is not None:
        beyond = "" if line.ridge <= line.max_requests else ", more than fit"
        number = format_count(line.ridge, "request")
        return f"ridge: {number}{beyond}; below, reading memory limits the speed"
    if line.device.flops is None or line.costs.flops_per_token is None:
        return "no ridge: the peak of its computing is unknown"
    return "no ridge: reading the KV caches limits the speed at any number of requests"


def _row_counts(line: Roofline) -> list[int]:
    counts = {n for n in (1, 4, 16, 64, 256, 1024) if n < line.max_requests}
    ridge = line.ridge
    if ridge is not None and ridge <= line.max_requests:
        counts.add(ridge)
    return sorted(counts | {min(line.max_requests, 4096)})


def _row(line: Roofline, count: int) -> tuple[str, ...]:
    rate = line.tokens_per_s(count)
    cost = line.cost_per_million(count)
    note = " (all that fit)" if count == line.max_requests else ""
    cells = (
        f"{count:,}{note}",
        format_rate(rate),
        format_rate(rate / count),
        line.side(count),
        f"{line.cache_share(count):.0%}",
    )
    return cells if cost is None else (*cells, f"{cost:,.2f}")


def _at_contexts(line: Roofline) -> list[Roofline]:
    longest = line.costs.shape.ctx_train or max(_CONTEXTS)
    contexts = {ctx for ctx in _CONTEXTS if ctx < longest} | {min(longest, max(_CONTEXTS))}
    return [line.at_context(ctx) for ctx in sorted(contexts)]


def _context_row(line: Roofline) -> tuple[str, ...]:
    count = line.max_requests
    rate = format_rate(line.tokens_per_s(count)) if count else ""
    kept = line.costs.token_bytes * line.ctx + line.costs.shape.state_bytes
    return (
        f"{line.ctx:,}",
        format_size(kept),
        f"{line.cache_share(1):.0%}",
        f"{count:,}" if count else "none",
        rate,
    )


def _speculation_lines(curve: ModelCurve) -> Iterator[str]:
    line, draft = curve.roofline, curve.draft
    source = "from the text itself" if draft is None else f"of {draft.name}"
    yield f"speculation: tokens per pass with drafts {source}, and the speed of one request"
    yield f"on {line.device.name}"
    yield ""
    head = ("ACCEPTED", *(f"{k} DRAFT{'S' * (k > 1)}" for k in DRAFTS))
    rows = [
        (f"{acceptance:.0%}", *(_speculation_cell(curve, acceptance, k) for k in DRAFTS))
        for acceptance in ACCEPTANCES
    ]
    yield from tables.align_columns([head, *rows])


def _speculation_cell(curve: ModelCurve, acceptance: float, drafts: int) -> str:
    speedup = _speedup(curve, acceptance, drafts)
    return f"{expected_tokens(acceptance, drafts):.2f} ({speedup:.2f}x)"


def _speedup(curve: ModelCurve, acceptance: float, drafts: int) -> float:
    draft_s = 0.0 if curve.draft is None else curve.draft.step_s(1)
    return speculative_speedup(curve.roofline, acceptance, drafts, draft_s)


def _speculation_record(curve: ModelCurve) -> dict[str, Any]:
    return {
        "device": curve.roofline.device.name,
        "model": curve.roofline.name,
        "draft": None if curve.draft is None else curve.draft.name,
        "passes": [
            {
                "acceptance": acceptance,
                "drafts": k,
                "tokens": expected_tokens(acceptance, k),
                "speedup": _speedup(curve, acceptance, k),
            }
            for acceptance in ACCEPTANCES
            for k in DRAFTS
        ],
    }


def _record(line: Roofline) -> dict[str, Any]:
    device = line.device
    last = min(line.max_requests, _MAX_REQUESTS)
    return {
        "device": device.name,
        "model": line.name,
        "ctx": line.ctx,
        "bandwidth_bytes_per_s": device.bytes_per_s,
        "flops": device.flops,
        "devices": device.count,
        "source": device.source,
        "fits": line.fits,
        "max_requests": line.max_requests,
        "ridge": line.ridge,
        "points": [_point_record(line, 1 << power) for power in range(last.bit_length())],
        "contexts": [
            {
                "ctx": one.ctx,
                "kv_bytes": one.costs.token_bytes * one.ctx + one.costs.shape.state_bytes,
                "kv_share": one.cache_share(1),
                "max_requests": one.max_requests,
            }
            for one in _at_contexts(line)
        ],
    }


def _point_record(line: Roofline, count: int) -> dict[str, Any]:
    return {
        "requests": count,
        "tokens_per_s": line.tokens_per_s(count),
        "limit": line.side(count),
        "kv_share": line.cache_share(count),
        "cost_per_million": line.cost_per_million(count),
    }


def _short_number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if value >= 1e3 else f"{value:.3g}"
