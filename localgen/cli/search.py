"""`localgen search`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.units import format_params, format_size
from localgen.cli.arguments import JsonFlag

if TYPE_CHECKING:
    from localgen.hub.search import FoundModel

WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Parts of a name, title, license or kind (chat, code, reasoning)."),
]


def command(words: WordsArgument = None, json: JsonFlag = False) -> None:
    """List models that `pull` knows by a short name, and whether they fit in memory.

    SIZE is that of the default download. RUNS ON is where it would run with the memory that is
    free now. Models that match all words are listed. Uses no network.
    """
    from localgen.cli import tables
    from localgen.hub import quant_choice
    from localgen.hub.search import search_catalog

    memory = quant_choice.available_memory()
    found = search_catalog(words or (), memory)
    if json:
        tables.print_json(found)
        return
    if not found:
        tables.print_notice(_no_match_text(words or []))
        return
    head = ("NAME", "PARAMS", "SIZE", "NEEDS", "RUNS ON", "INSTALLED", "ALSO")
    tables.print_table(head, [_table_row(model) for model in found])
    free = f"{format_size(memory.ram_bytes)} of memory"
    if memory.gpu_bytes:
        free += f" and {format_size(memory.gpu_bytes)} of the GPU"
    tables.print_notice(
        f"{free} are free; `localgen pull NAME` downloads a model, "
        "`localgen show NAME --quants` lists its other sizes"
    )


def _table_row(model: FoundModel) -> tuple[str, ...]:
    is_known = model.size_bytes is not None and model.need_bytes is not None
    return (
        model.name,
        "unknown" if model.params is None else format_params(model.params),
        format_size(model.size_bytes or 0) if is_known else "unknown",
        format_size(model.need_bytes or 0) if is_known else "unknown",
        model.runs_on or ("does not fit" if is_known else "unknown"),
        ", ".join(model.installed),
        ", ".join(model.also),
    )


def _no_match_text(words: list[str]) -> str:
    from localgen.hub.resolve import did_you_mean, pullable_spellings

    text = " ".join(words)
    return (
        f"No model of the catalog matches {text!r}.{did_you_mean(text, pullable_spellings())} "
        "`localgen pull owner/name` downloads a repository of the hub that has .gguf files or "
        "safetensors."
    )
