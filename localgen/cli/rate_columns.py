"""Columns and notes for the decode rates of several quantizations."""

from __future__ import annotations

from collections.abc import Mapping

from localgen.machine.decode_rates import DecodeRates


def format_rate(tokens_per_s: float) -> str:
    """Tokens/s with one decimal below 100, as an integer from there on."""
    return f"{tokens_per_s:,.1f}" if tokens_per_s < 100 else f"{tokens_per_s:,.0f}"


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
