"""`localgen ps`."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from localgen.backends.units import format_size
from localgen.cli.arguments import JsonFlag

if TYPE_CHECKING:
    from localgen.client.responses import RunningModel


def command(json: JsonFlag = False) -> None:
    """List loaded models: size, memory in use, processor, context and time until unloading."""
    from localgen.backends.terminal_text import escape_name
    from localgen.cli import tables
    from localgen.client import LocalClient
    from localgen.client.responses import silence_notice

    with closing(LocalClient()) as client:
        running = _with_aliases(client.running_models())
    if json:
        tables.print_json(running)
        return
    rows = [
        (
            escape_name(model.name),
            model.id,
            format_size(model.size_bytes),
            format_size(model.memory_bytes) if model.memory_bytes else "-",
            model.processor or "-",
            f"{model.ctx:,}" if model.ctx else "-",
            _state(model),
            ", ".join(map(escape_name, model.aliases)),
        )
        for model in running
    ]
    header = ("NAME", "ID", "SIZE", "MEMORY", "PROCESSOR", "CONTEXT", "UNTIL", "ALSO")
    tables.print_table(header, rows)
    for model in running:
        if model.adapters:
            found = (f"{escape_name(a.name)} ({format_size(a.num_bytes)})" for a in model.adapters)
            tables.print_notice(f"{model.name} has adapters in memory: {', '.join(found)}")
        if model.silent_s is not None:
            tables.print_notice(silence_notice(model.name, model.silent_s))


def _with_aliases(running: list[RunningModel]) -> list[RunningModel]:
    """Add the user's other names of the models."""
    from dataclasses import replace

    from localgen.cli import tables
    from localgen.hub.models_file import models_file_problem
    from localgen.hub.resolve import installed_aliases, installed_presets

    if not running:
        return []
    if problem := models_file_problem():
        tables.print_notice(f"{problem}; the names in it are not listed")
        return running
    named = [*installed_aliases(), *installed_presets()]
    return [
        replace(
            model,
            aliases=tuple(
                name for name, file in named if str(file.path) == model.path and name != model.name
            ),
        )
        for model in running
    ]


def _state(model: RunningModel) -> str:
    from localgen.cli import tables

    if model.state == "loading":
        return f"loading ({model.progress:.0%})"
    return tables.format_expiry(model.until_s, model.active_requests)
