"""Rooflines as a chart and tables, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from localgen.backends.units import format_count, format_rate, format_size
from localgen.charts import Chart, Series, chart_text
from localgen.cli import tables
from localgen.planning.roofline import Roofline, expected_tokens, speculative_speedup

_CHART_ROWS = 16
_MIN_REQUESTS, _MAX_REQUESTS = 16, 1024
_POINTS_PER_DOUBLING = 4
_CONTEXTS = (1024, 4096, 16_384, 32_768, 131_072)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
DRAFTS = (1, 2, 4, 8)

MeasuredPoint = tuple[int, float]


def curves_text(curves: Sequence[Roofline], measured: Sequence[MeasuredPoint], width: int) -> str:
    """The chart, the figures of each curve, and tokens per pass of speculation.

    measured: requests at once and their tokens/s together. width: of the terminal in columns.
    """
    parts: list[Iterable[str]] = [_title(curves, width)]
    fitting = [one for one in curves if one.fits]
    if fitting:
        parts.append(_chart(fitting, measured, width))
    parts += [_curve_lines(one, curves, width) for one in curves]
    if len(fitting) > 1:
        parts.append(_summary(fitting))
    if fitting:
        parts.append(_speculation_lines(fitting[-1], width))
    return "\n\n".join("\n".join(part) for part in parts)


def curves_json(curves: Sequence[Roofline], measured: Sequence[MeasuredPoint]) -> str:
    """One JSON object: `curves`, `speculation` and `measured`."""
    record = {
        "curves": [_record(one) for one in curves],
        "speculation": [_speculation_record(one) for one in curves],
        "measured": [{"requests": count, "tokens_per_s": rate} for count, rate in measured],
    }
    return tables.json_text(record, indent=2)


def _label(line: Roofline, curves: Sequence[Roofline]) -> str:
    """The device, and the quantization where several are drawn."""
    several = len({one.name for one in curves}) > 1
    quant = line.name.rpartition(":")[2]
    return f"{line.device.name} {quant}" if several else line.device.name


def _title(curves: Sequence[Roofline], width: int) -> Iterator[str]:
    names = dict.fromkeys(one.name for one in curves)
    repo = next(iter(names)).rpartition(":")[0]
    quants = ", ".join(name.rpartition(":")[2] for name in names)
    model = f"{repo}: {quants}" if len(names) > 1 else next(iter(names))
    tokens = format_count(curves[0].ctx, "token")
    yield from _wrapped(f"{model}: upper limit of tokens/s, with {tokens} of context", width)


def _wrapped(sentence: str, width: int) -> list[str]:
    return textwrap.wrap(sentence, width)


def _chart(lines: Sequence[Roofline], measured: Sequence[MeasuredPoint], width: int) -> list[str]:
    last = _last_count(lines, measured)
    drawn = [
        Series(_label(line, lines), _points(line, min(last, line.max_requests))) for line in lines
    ]
    ridges = [
        (line.ridge, line.tokens_per_s(line.ridge))
        for line in lines
        if line.ridge is not None and line.ridge <= min(last, line.max_requests)
    ]
    drawn.append(Series("ridge", ridges, "◆"))
    drawn.append(Series("measured", measured, "●"))
    chart = Chart(
        series=[one for one in drawn if one.points],
        x_title=_x_title(bool(ridges), bool(measured)),
        y_title="tokens/s of all requests together",
        format_x=lambda count: f"{count:,.0f}",
        format_y=_short_number,
    )
    return chart_text(chart, width, max(_CHART_ROWS, len(lines)))


def _x_title(has_ridge: bool, has_measured: bool) -> str:
    marks = ["◆ ridge: computing limits"] * has_ridge
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


def _summary(curves: Sequence[Roofline]) -> Iterator[str]:
    """Table with a row for each device."""
    priced = any(one.device.price is not None for one in curves)
    head = ("DEVICE", "1 REQUEST", "MAX REQUESTS", "TOKENS/S", *(("COST OF A MILLION",) * priced))
    rows = []
    for one in curves:
        count = one.max_requests
        cost = one.cost_per_million(count)
        cells = (
            _label(one, curves),
            format_rate(one.tokens_per_s(1)),
            f"{count:,}",
            format_rate(one.tokens_per_s(count)),
        )
        rows.append((*cells, _cost_cell(cost)) if priced else cells)
    yield from tables.align_columns([head, *rows])


def _curve_lines(line: Roofline, curves: Sequence[Roofline], width: int) -> Iterator[str]:
    device = line.device
    yield from _wrapped(f"{_label(line, curves)}: {_device_text(line)}", width)
    if not line.fits:
        drafts = f", its draft model {line.draft.name}" if line.draft else ""
        yield from _wrapped(
            f"does not fit: weights {format_size(line.costs.weights_bytes)}, buffers "
            f"{format_size(line.costs.buffer_bytes * device.count)}{drafts}, and "
            f"{format_size(line.request_bytes)} for a request of {line.ctx:,} tokens; it has "
            f"{format_size(device.free_bytes * device.count)}",
            width,
        )
        return
    yield from _wrapped(_ridge_sentence(line), width)
    yield ""
    priced = device.price is not None
    head = ("REQUESTS", "TOKENS/S", "EACH", "LIMIT", "KV SHARE", *(("COST OF A MILLION",) * priced))
    yield from tables.align_columns([head, *(_row(line, n) for n in _row_counts(line))])
    yield ""
    head = ("CONTEXT", "KV CACHE", "KV SHARE AT 1", "MAX REQUESTS", "TOKENS/S AT MAX")
    yield from tables.align_columns([head, *map(_context_row, _at_contexts(line))])


def _device_text(line: Roofline) -> str:
    device = line.device
    parts = [format_size(device.free_bytes), f"{device.bytes_per_s / 1e9:,.4g} GB/s"]
    if device.flops:
        parts.append(_flops_text(device.flops))
    if device.count > 1 and device.link_bytes_per_s:
        parts.append(f"links {device.link_bytes_per_s / 1e9:,.4g} GB/s")
    if device.price is not None:
        parts.append(f"{device.price:g} per hour")
    each = " each" if device.count > 1 else ""
    return f"{', '.join(parts)}{each} ({device.source})"


def _flops_text(flops: float) -> str:
    if flops < 1e12:
        return f"{flops / 1e9:.3g} GFLOP/s"
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e14 else f"{flops / 1e12:.3g} TFLOP/s"


def _ridge_sentence(line: Roofline) -> str:
    ridge = line.ridge
    if ridge == 1:
        return "ridge: 1 request; computing limits the speed from the first on"
    if ridge is not None:
        beyond = "" if ridge <= line.max_requests else ", more than fit"
        return f"ridge: {ridge:,} requests{beyond}; below it, reading from memory limits the speed"
    if line.device.flops is None:
        return "no ridge: the peak of this device is unknown"
    if line.costs.flops_per_token is None:
        return "no ridge: the number of the model's parameters is unknown"
    return "no ridge: reading from memory limits the speed at any number of requests"


def _row_counts(line: Roofline) -> list[int]:
    counts = {n for n in (1, 4, 16, 64, 256, 1024) if n < line.max_requests}
    ridge = line.ridge
    if ridge is not None and ridge <= line.max_requests:
        counts.add(ridge)
    return sorted(counts | {min(line.max_requests, 4096)})


def _row(line: Roofline, count: int) -> tuple[str, ...]:
    rate = line.tokens_per_s(count)
    cost = line.cost_per_million(count)
    note = " (max)" if count == line.max_requests else ""
    cells = (
        f"{count:,}{note}",
        format_rate(rate),
        _each_cell(rate / count),
        line.side(count),
        f"{line.cache_share(count):.0%}",
    )
    return cells if cost is None else (*cells, _cost_cell(cost))


def _each_cell(rate: float) -> str:
    return format_rate(rate) if rate >= 1 else f"{rate:.2g}"


def _cost_cell(cost: float | None) -> str:
    if cost is None:
        return ""
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}"


def _at_contexts(line: Roofline) -> list[Roofline]:
    longest = line.costs.shape.ctx_train or max(_CONTEXTS)
    contexts = {ctx for ctx in _CONTEXTS if ctx < longest} | {min(longest, max(_CONTEXTS))}
    return [line.at_context(ctx) for ctx in sorted(contexts)]


def _context_row(line: Roofline) -> tuple[str, ...]:
    count = line.max_requests
    rate = format_rate(line.tokens_per_s(count)) if count else ""
    return (
        f"{line.ctx:,}",
        format_size(line.request_bytes),
        f"{line.cache_share(1):.0%}",
        f"{count:,}" if count else "none",
        rate,
    )


def _speculation_lines(line: Roofline, width: int) -> Iterator[str]:
    source = "from the text itself" if line.draft is None else f"of {line.draft.name}"
    is_known = bool(line.compute_s(1))
    speed = f", and the speed of one request on {line.device.name}" if is_known else ""
    yield from _wrapped(f"speculation: tokens per pass with drafts {source}{speed}", width)
    yield ""
    head = ("ACCEPTED", *(f"{k} DRAFT{'S' * (k > 1)}" for k in DRAFTS))
    rows = []
    for acceptance in ACCEPTANCES:
        tokens = [f"{expected_tokens(acceptance, k):.2f}" for k in DRAFTS]
        if is_known:
            speeds = (speculative_speedup(line, acceptance, k) for k in DRAFTS)
            tokens = [f"{each} ({x:.2f}x)" for each, x in zip(tokens, speeds, strict=True)]
        rows.append((f"{acceptance:.0%}", *tokens))
    yield from tables.align_columns([head, *rows])


def _speculation_record(line: Roofline) -> dict[str, Any]:
    is_known = bool(line.compute_s(1))
    return {
        "device": line.device.name,
        "model": line.name,
        "draft": None if line.draft is None else line.draft.name,
        "passes": [
            {
                "acceptance": acceptance,
                "drafts": k,
                "tokens": expected_tokens(acceptance, k),
                "speedup": speculative_speedup(line, acceptance, k) if is_known else None,
            }
            for acceptance in ACCEPTANCES
            for k in DRAFTS
        ],
    }


def _record(line: Roofline) -> dict[str, Any]:
    device = line.device
    return {
        "device": device.name,
        "model": line.name,
        "ctx": line.ctx,
        "bandwidth_bytes_per_s": device.bytes_per_s,
        "flops": device.flops,
        "devices": device.count,
        "memory_bytes": device.free_bytes,
        "link_bytes_per_s": device.link_bytes_per_s if device.count > 1 else None,
        "price": device.price,
        "source": device.source,
        "fits": line.fits,
        "max_requests": line.max_requests,
        "ridge": line.ridge,
        "points": [_point_record(line, count) for count in _json_counts(line)],
        "contexts": [
            {
                "ctx": one.ctx,
                "kv_bytes": one.request_bytes,
                "kv_share": one.cache_share(1),
                "max_requests": one.max_requests,
                "tokens_per_s": one.tokens_per_s(one.max_requests) if one.fits else None,
            }
            for one in _at_contexts(line)
        ],
    }


def _json_counts(line: Roofline) -> list[int]:
    """Powers of two, the ridge, and the last number that fits."""
    last = min(line.max_requests, _MAX_REQUESTS)
    counts = {1 << power for power in range(last.bit_length())} | {line.max_requests}
    if line.ridge is not None and line.ridge <= line.max_requests:
        counts.add(line.ridge)
    return sorted(counts - {0})


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
