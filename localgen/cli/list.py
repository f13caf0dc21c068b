"""`localgen list`."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import typer

from localgen.cli.arguments import JsonFlag

if TYPE_CHECKING:
    from localgen.client import ModelCard


def command(json: JsonFlag = False) -> None:
    """List local models and the disk usage of the model cache."""
    from localgen.cli import tables
    from localgen.client import Client

    with closing(Client()) as client:
        cards = client.models()
    if json:
        tables.print_json(cards)
        return
    rows = [
        (
            card.name,
            tables.format_size(card.size_bytes),
            card.source,
            card.state,
            _other_names(card),
        )
        for card in cards
    ]
    tables.print_table(("NAME", "SIZE", "SOURCE", "STATE", "ALSO"), rows)
    _print_disk_use()


def _other_names(card: ModelCard) -> str:
    """Other names of a model: its catalog name and its aliases."""
    from localgen.hub import catalog
    from localgen.hub.aliases import load_aliases

    repo, _, quant = card.name.partition(":")
    entry = catalog.entry_by_repo(repo) if card.source == "cache" else None
    names = {card.name, card.path}
    if entry is not None and quant:
        is_default = catalog.same_ignoring_case(quant, entry.gguf.quant)
        names |= {f"{name}:{quant}" for name in (entry.alias, *entry.names)}
        names |= {entry.alias, *entry.names} if is_default else set()
        short = entry.alias if is_default else f"{entry.alias}:{quant}"
    given = [name for name, target in load_aliases().items() if target in names]
    return ", ".join([short, *given] if entry is not None and quant else given)


def _print_disk_use() -> None:
    from localgen.cli import tables
    from localgen.hub.cache import scan_hf_cache

    found = scan_hf_cache()
    if found is None or not (found.size_on_disk or found.incomplete_files):
        return
    unfinished = found.incomplete_size_on_disk
    more = f", plus {tables.format_size(unfinished)} in unfinished downloads" if unfinished else ""
    typer.echo(f"{tables.format_size(found.size_on_disk)} in {found.cache_dir}{more}", err=True)
