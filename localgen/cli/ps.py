"""`localgen ps`."""

from __future__ import annotations

from contextlib import closing

from localgen.backends.units import format_size
from localgen.cli.arguments import JsonFlag


def command(json: JsonFlag = False) -> None:
    """List loaded models: size, memory in use, processor, context and time until unloading."""
    from localgen.cli import tables
    from localgen.client import LocalClient
    from localgen.client.responses import silence_notice

    with closing(LocalClient()) as client:
        running = client.running_models()
    if json:
        tables.print_json(running)
        return
    rows = [
        (
            model.name,
            model.id,
            format_size(model.size_bytes),
            format_size(model.memory_bytes) if model.memory_bytes else "-",
            model.processor,
            f"{model.ctx:,}",
            tables.format_expiry(model.until_s, model.active_requests),
        )
        for model in running
    ]
    header = ("NAME", "ID", "SIZE", "MEMORY", "PROCESSOR", "CONTEXT", "UNTIL")
    tables.print_table(header, rows)
    for model in running:
        if model.silent_s is not None:
            tables.print_notice(silence_notice(model.name, model.silent_s))
