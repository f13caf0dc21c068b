"""`localgen list`."""

from __future__ import annotations

from contextlib import closing

from localgen.cli.arguments import JsonFlag


def command(json: JsonFlag = False) -> None:
    """List the models that can be named: the built-in one, and what the cache holds."""
    from localgen.cli import tables
    from localgen.client import Client

    with closing(Client()) as client:
        cards = client.models()
    if json:
        tables.print_json(cards)
        return
    rows = [(card.name, tables.size(card.size_bytes), card.source, card.state) for card in cards]
    tables.print_table(("NAME", "SIZE", "SOURCE", "STATE"), rows)
