"""The evaluation of several models as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from localgen.backends.units import format_size
from localgen.quant.request.events import EvalEvent, EvalRow
from localgen.quant.request.losses import DomainLoss, Interval, KlDifference

UNKNOWN = "–"
_Table = list[tuple[str, ...]]


def eval_table(rows: Sequence[EvalRow]) -> _Table:
    """Header and rows, without columns that have no values."""
    head = ("MODEL", "SIZE", "BITS/WEIGHT", "KL", "PERPLEXITY", "TOKENS/S")
    lines = [head, *(_cells(row, rows[0]) for row in rows)]
    known = [i for i in range(len(head)) if any(line[i] != UNKNOWN for line in lines[1:])]
    return [tuple(line[index] for index in known) for line in lines]


def domain_table(rows: Sequence[EvalRow]) -> _Table:
    """Header and rows of the losses by domain; empty for a text without domains."""
    lines = [
        (row.name, one.domain, str(one.windows), _kl_cell(one), _perplexity_cell(one, original))
        for row in rows
        for one, original in zip(row.domains, rows[0].domains, strict=False)
    ]
    return [("MODEL", "DOMAIN", "SEQUENCES", "KL", "PERPLEXITY"), *lines] if lines else []


def verdict_lines(verdict: EvalEvent) -> list[str]:
    """Sentences on the losses: what can be told, and what cannot."""
    results = [row for row in verdict.rows if row.kl is not None]
    if not results:
        return []
    if results[0].kl_interval is None:
        return [
            f"{verdict.windows} sequences are too few for an interval: raise --eval-samples, or "
            "give a longer text"
        ]
    return [
        f"Intervals are of 95 %, from {verdict.windows} sequences; KL in nats per token.",
        *(_loss_sentence(row) for row in results),
        *(_difference_sentence(one) for one in verdict.differences),
    ]


def verdict_markdown(verdict: EvalEvent) -> list[str]:
    """Tables and sentences as lines of Markdown, for a model card."""
    sentences = [f"- {line}" for line in verdict_lines(verdict)]
    parts = [_markdown(eval_table(verdict.rows)), _markdown(domain_table(verdict.rows)), sentences]
    return [line for part in parts if part for line in (*part, "")][:-1]


def _markdown(table: _Table) -> list[str]:
    if not table:
        return []
    head, *lines = table
    return [
        "| " + " | ".join(cells) + " |"
        for cells in (tuple(map(str.lower, head)), ("---",) * len(head), *lines)
    ]


def _cells(row: EvalRow, baseline: EvalRow) -> tuple[str, ...]:
    return (
        row.name,
        format_size(row.size_bytes),
        f"{row.bits_per_weight:.2f}",
        _kl_cell(row),
        _perplexity_cell(row, None if row is baseline else baseline),
        UNKNOWN if row.tokens_per_s is None else f"{row.tokens_per_s:.1f}",
    )


def _kl_cell(loss: EvalRow | DomainLoss) -> str:
    if loss.kl is None:
        return UNKNOWN
    bounds = loss.kl_interval
    return _nats(loss.kl) + (f" ({_nat_bounds(bounds)})" if bounds else "")


def _perplexity_cell(loss: EvalRow | DomainLoss, baseline: EvalRow | DomainLoss | None) -> str:
    """baseline: None or the same for the original itself."""
    if loss.perplexity is None:
        return UNKNOWN
    cell = f"{loss.perplexity:.3f}"
    if baseline is None or baseline is loss or not baseline.perplexity:
        return cell
    change = f"{100 * (loss.perplexity / baseline.perplexity - 1):+.2f} %"
    bounds = loss.perplexity_change
    return f"{cell} ({change}{f', {_percent_bounds(bounds)}' if bounds else ''})"


def _loss_sentence(row: EvalRow) -> str:
    assert row.kl is not None
    assert row.kl_interval is not None
    assert row.perplexity_change is not None
    told = (
        f"perplexity {_percent_bounds(row.perplexity_change)} %"
        if row.perplexity_change.excludes_zero
        else "its perplexity cannot be told apart from the original's"
    )
    return f"{row.name}: KL {_nats(row.kl)} ({_nat_bounds(row.kl_interval)}); {told}"


def _difference_sentence(one: KlDifference) -> str:
    assert one.interval is not None
    bounds = _nat_bounds(one.interval, sign="+")
    if not one.interval.excludes_zero:
        return f"{one.first} and {one.second} cannot be told apart: KL {bounds}"
    return f"{one.second} is worse than {one.first}: KL {bounds}"


def _nat_bounds(bounds: Interval, sign: str = "") -> str:
    return f"{_nats(bounds.low, sign)} to {_nats(bounds.high, sign)}"


def _percent_bounds(bounds: Interval) -> str:
    return f"{100 * bounds.low:+.2f} to {100 * bounds.high:+.2f}"


def _nats(value: float, sign: str = "") -> str:
    """Four decimals, or six for small values."""
    return f"{value:{sign}.{4 if abs(value) >= 1e-3 else 6}f}"
