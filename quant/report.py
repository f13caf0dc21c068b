"""The evaluation of several models as a table."""

from __future__ import annotations

from collections.abc import Sequence

from localgen.backends.units import format_size
from localgen.quant.request.events import EvalRow

UNKNOWN = "–"


def eval_table(rows: Sequence[EvalRow]) -> list[tuple[str, ...]]:
    """Header and rows, without columns that have no values."""
    head = ("MODEL", "SIZE", "BITS/WEIGHT", "PERPLEXITY", "KL", "TOKENS/S")
    lines = [head, *(_cells(row, rows[0]) for row in rows)]
    known = [i for i in range(len(head)) if any(line[i] != UNKNOWN for line in lines[1:])]
    return [tuple(line[index] for index in known) for line in lines]


def eval_markdown(rows: Sequence[EvalRow]) -> list[str]:
    """The table as lines of Markdown, for a model card."""
    head, *lines = eval_table(rows)
    return [
        "| " + " | ".join(cells) + " |"
        for cells in (tuple(map(str.lower, head)), ("---",) * len(head), *lines)
    ]


def _cells(row: EvalRow, baseline: EvalRow) -> tuple[str, ...]:
    perplexity = UNKNOWN if row.perplexity is None else f"{row.perplexity:.3f}"
    if row.perplexity is not None and baseline.perplexity and row is not baseline:
        perplexity += f" ({100 * (row.perplexity / baseline.perplexity - 1):+.2f} %)"
    return (
        row.name,
        format_size(row.size_bytes),
        f"{row.bits_per_weight:.2f}",
        perplexity,
        UNKNOWN if row.kl is None else f"{row.kl:.4f}",
        UNKNOWN if row.tokens_per_s is None else f"{row.tokens_per_s:.1f}",
    )
