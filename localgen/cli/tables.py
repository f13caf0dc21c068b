"""Text tables and JSON on standard output, notices on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import typer

from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_rate
from localgen.machine.decode_rates import DecodeRates


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print left-aligned columns with three spaces between, in the format of `ollama ps`."""
    for line in align_columns([header, *rows]):
        typer.echo(line)


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with left-aligned columns."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def print_line(line: str) -> None:
    """Print a line on standard output, with control characters escaped."""
    typer.echo(one_line(line))


def print_notice(line: str) -> None:
    """Print a notice on standard error."""
    print(one_line(line), file=sys.stderr, flush=True)


def print_json(records: Sequence[Any]) -> None:
    """Print dataclasses as one JSON array."""
    typer.echo(json_text([asdict(record) for record in records], indent=2))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Encode a value as JSON for standard output; sets become sorted lists.

    On a terminal, control characters are escaped.
    """
    if not sys.stdout.isatty():
        return json.dumps(value, default=sorted, ensure_ascii=False, indent=indent)
    return json.dumps(value, default=sorted, indent=indent).replace("\x7f", "\\u007f")


def format_expiry(until_s: float | None, active_requests: int) -> str:
    """Time until an idle model is unloaded. until_s: seconds from now, or None for never."""
    if active_requests:
        return f"busy ({active_requests})"
    if until_s is None:
        return "forever"
    minutes, seconds = round(until_s / 60), round(until_s)
    if seconds < 2:
        return "now"
    return f"{minutes} minutes from now" if minutes > 1 else f"{seconds} seconds from now"


def format_age(seconds: float) -> str:
    """Time since an event, in its largest unit."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:,.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"


def rate_cells(rates: DecodeRates | None) -> tuple[str, ...]:
    """One cell for each of DecodeRates.USES."""
    return tuple(map(format_rate, rates)) if rates else ("–",) * len(DecodeRates.USES)


def rate_notes(fastest: Mapping[str, str]) -> list[str]:
    """Lines below a table with rate_cells; none if nothing is compared.

    fastest: the fastest alternative for each use.
    """
    if not fastest:
        return []
    return [
        "",
        "Tokens/s on this CPU, measured with a small model; with 3 drafts if all are accepted.",
        f"Fastest here: {', '.join(f'{use}: {name}' for use, name in fastest.items())}.",
    ]
