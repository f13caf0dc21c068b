"""What models are worth beside each other, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localgen.backends.units import format_size

UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One model. perplexity, kl, tokens_per_s: None where not measured, or where it cannot be.

    kl: from the first row's model, in nats. bits_per_weight: of everything in its files.
    """

    name: str
    path: str
    size_bytes: int
    bits_per_weight: float
    perplexity: float | None = None
    kl: float | None = None
    tokens_per_s: float | None = None


def eval_table(rows: Sequence[EvalRow]) -> list[tuple[str, ...]]:
    """Columns that nothing is known of are left out."""
    head = ("MODEL", "SIZE", "BITS/WEIGHT", "PERPLEXITY", "KL", "TOKENS/S")
    lines = [head, *(_cells(row, rows[0]) for row in rows)]
    known = [i for i in range(len(head)) if any(line[i] != UNKNOWN for line in lines[1:])]
    return [tuple(line[index] for index in known) for line in lines]


def eval_markdown(rows: Sequence[EvalRow]) -> list[str]:
    """The same for a model card."""
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
