"""The table of a model's quantizations: size, memory needed, and where each would run."""

from __future__ import annotations

import typer

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_size
from localgen.cli import tables
from localgen.hub import quant_choice
from localgen.hub.cache import cached_models
from localgen.hub.catalog import CatalogEntry, same_ignoring_case
from localgen.hub.hf_client import HubUnavailable, forward_warnings
from localgen.hub.pull import quant_options
from localgen.hub.reference import HubReference, resolve_reference
from localgen.hub.repository import list_repo
from localgen.hub.resolve import expand_alias, is_path, resolve_model
from localgen.hub.search import cached_quants


def print_quant_table(model: str, *, as_json: bool) -> None:
    """Print the quantizations of a model as a table or as JSON; the choice of `auto` is marked.

    Raises ModelNotFound if the model is unknown or has no .gguf files, InvalidRequest if it is a
    local file.
    """
    target = expand_alias(model)
    wanted = None if is_path(target) else resolve_reference(target)
    if wanted is None:
        file = resolve_model(target)
        raise InvalidRequest(
            f"{file.name} is a local file and has no other quantizations; "
            f"`localgen show {model}` describes it"
        )
    room = quant_choice.available_memory()
    ways = _list_alternatives(wanted, room)
    if not ways:
        raise ModelNotFound(f"{wanted.repo} has no .gguf files: no quantizations to choose from")
    here = _cached_quants(wanted)
    found = quant_choice.fit_quants(ways, room, wanted.entry)
    chosen = quant_choice.best_fit(found)
    if as_json:
        records = [
            {
                "quant": one.option.quant,
                "size_bytes": one.option.size_bytes,
                "need_bytes": one.need_bytes,
                "runs_on": one.place,
                "auto": one is chosen,
                "here": one.option.quant in here,
            }
            for one in found
        ]
        typer.echo(tables.json_text(records, indent=2))
        return
    head = ("QUANT", "SIZE", "NEEDS", "RUNS ON", "LOCAL", "")
    tables.print_table(
        head, [_table_row(one, one is chosen, one.option.quant in here) for one in found]
    )
    typer.echo(_auto_choice_note(chosen, found, room, wanted.entry))


def _table_row(one: quant_choice.QuantFit, is_chosen: bool, is_cached: bool) -> tuple[str, ...]:
    alternative = one.option
    return (
        alternative.quant,
        format_size(alternative.size_bytes),
        format_size(one.need_bytes),
        one.place or "does not fit",
        "yes" if is_cached else "",
        "<- auto" if is_chosen else "",
    )


def _auto_choice_note(
    chosen: quant_choice.QuantFit | None,
    fits: list[quant_choice.QuantFit],
    memory: quant_choice.AvailableMemory,
    entry: CatalogEntry | None,
) -> str:
    if chosen is None:
        free = format_size(max(memory.ram_bytes, memory.gpu_bytes))
        return f"None fits in the {free} of free memory."
    return one_line(quant_choice.fit_reason(chosen, fits, memory, entry)) + "."


def _cached_quants(model_ref: HubReference) -> set[str]:
    """Quantizations of the model in the cache, by their names in the table."""
    cached = cached_models()
    if model_ref.entry is not None:
        return set(cached_quants(model_ref.entry, cached))
    return {
        model.quant
        for model in cached
        if model.is_gguf and same_ignoring_case(model.repo, model_ref.repo)
    }


def _list_alternatives(
    model_ref: HubReference, memory: quant_choice.AvailableMemory
) -> list[quant_choice.QuantOption]:
    """Quantizations on the hub; if it is unreachable, those of the catalog.

    Raises HubUnavailable if the catalog has none either.
    """
    notice = tables.print_notice
    try:
        with forward_warnings(notice):
            return quant_options(list_repo(_gguf_repo(model_ref), notice), model_ref.entry, memory)
    except HubUnavailable as error:
        entry = model_ref.entry
        if entry is None or not entry.gguf.sizes:
            raise
        notice(f"{error.message}; using the sizes of the catalog")
        files = [
            quant_choice.QuantOption(quant, bytes_) for quant, bytes_ in entry.gguf.sizes.items()
        ]
        return [*files, *quant_choice.safetensors_options(entry, memory)]


def _gguf_repo(model_ref: HubReference) -> str:
    return model_ref.entry.gguf.repo if model_ref.entry else model_ref.repo
