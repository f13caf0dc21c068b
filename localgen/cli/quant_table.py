"""The quantizations of a model, what each needs, and where it would run."""

from __future__ import annotations

import sys

import typer

from localgen.backends.errors import ModelNotFound
from localgen.backends.terminal_text import one_line
from localgen.backends.units import size
from localgen.cli import tables
from localgen.hub import quant_choice
from localgen.hub.aliases import aliases
from localgen.hub.cache import cached_models
from localgen.hub.catalog import Entry, same
from localgen.hub.hf_client import HubUnavailable, talking
from localgen.hub.pull import alternatives
from localgen.hub.reference import Reference, reference
from localgen.hub.repository import listing
from localgen.hub.resolve import is_path, unknown


def show(model: str, *, as_json: bool) -> None:
    """Print them as a table, the one that `auto` takes marked, or as JSON. ModelNotFound."""
    meant = aliases().get(model, model)
    wanted = None if is_path(meant) else reference(meant)
    if wanted is None:
        raise unknown(meant)
    room = quant_choice.room_here()
    ways = _alternatives(wanted, room)
    if not ways:
        raise ModelNotFound(f"{wanted.repo} has no .gguf files, so no quantizations to choose from")
    here = _here(wanted)
    found = quant_choice.fits(ways, room, wanted.entry)
    chosen = quant_choice.best(found)
    if as_json:
        records = [
            {
                "quant": one.alternative.quant,
                "size_bytes": one.alternative.size_bytes,
                "need_bytes": one.need_bytes,
                "runs_on": one.place,
                "auto": one is chosen,
                "here": one.alternative.quant in here,
            }
            for one in found
        ]
        typer.echo(tables.json_text(records, indent=2))
        return
    head = ("QUANT", "SIZE", "NEEDS", "RUNS ON", "HERE", "")
    tables.print_table(
        head, [_row(one, one is chosen, one.alternative.quant in here) for one in found]
    )
    typer.echo(_conclusion(chosen, found, room, wanted.entry))


def _row(one: quant_choice.Fit, is_chosen: bool, is_here: bool) -> tuple[str, ...]:
    alternative = one.alternative
    return (
        alternative.quant,
        size(alternative.size_bytes),
        size(one.need_bytes),
        one.place or "does not fit",
        "yes" if is_here else "",
        "<- auto" if is_chosen else "",
    )


def _conclusion(
    chosen: quant_choice.Fit | None,
    found: list[quant_choice.Fit],
    room: quant_choice.Room,
    entry: Entry | None,
) -> str:
    if chosen is None:
        return f"None fits the {size(max(room.ram, room.gpu))} of memory that are free."
    return one_line(quant_choice.reason(chosen, found, room, entry)) + "."


def _here(wanted: Reference) -> set[str]:
    """The quantizations that the cache has, by their name in the table."""
    found = set()
    for model in cached_models():
        if model.is_gguf and same(model.repo, _gguf_repo(wanted)):
            found.add(model.quant)
        for folder in wanted.entry.folders if wanted.entry else ():
            if not model.is_gguf and same(model.repo, folder.repo):
                found.add(folder.method)
    return found


def _alternatives(wanted: Reference, room: quant_choice.Room) -> list[quant_choice.Alternative]:
    """As the hub has them; where it is out of reach, as the catalog has. HubUnavailable: it has
    none."""
    tell = _tell
    try:
        with talking(tell):
            return alternatives(listing(_gguf_repo(wanted), tell), wanted.entry, room)
    except HubUnavailable as error:
        entry = wanted.entry
        if entry is None or not entry.gguf.sizes:
            raise
        tell(f"{error.message}; these are the catalog's sizes")
        files = [
            quant_choice.Alternative(quant, bytes_) for quant, bytes_ in entry.gguf.sizes.items()
        ]
        return [*files, *quant_choice.folder_alternatives(entry, room)]


def _gguf_repo(wanted: Reference) -> str:
    return wanted.entry.gguf.repo if wanted.entry else wanted.repo


def _tell(line: str) -> None:
    print(one_line(line), file=sys.stderr)
