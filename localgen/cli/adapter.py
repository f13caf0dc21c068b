"""`localgen adapter`: names for a model with a LoRA adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from localgen.cli.arguments import JsonFlag
from localgen.cli.completion_values import complete_adapter, complete_model, complete_path

AdapterName = Annotated[
    str, typer.Argument(help="Name of the adapter.", autocompletion=complete_adapter)
]
ScaleOption = Annotated[
    float,
    typer.Option("--scale", help="Factor of its change to the weights.", metavar="<float>"),
]

group = typer.Typer(rich_markup_mode=None, add_completion=False)


@group.callback()
def adapter() -> None:
    """Manage LoRA adapters: names for a model whose weights an adapter changes.

    They are tables of models.toml in LOCALGEN_STATE_DIR, which may be edited: an edit applies from
    the next request.
    """


@group.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")],
    path: Annotated[
        str,
        typer.Argument(
            help="A GGUF file, or a folder as PEFT writes it.",
            autocompletion=lambda incomplete: complete_path(incomplete, ".gguf"),
        ),
    ],
    model: Annotated[
        str,
        typer.Argument(
            help="The model that it was trained with, by name or path.",
            autocompletion=complete_model,
        ),
    ],
    scale: ScaleOption = 1.0,
) -> None:
    """Add an adapter. Several adapters of one model share it: it is loaded once."""
    from localgen.cli import tables
    from localgen.hub.adapter import expand_path, parse_adapter
    from localgen.hub.adapters import add_adapter
    from localgen.hub.latest_tag import without_latest
    from localgen.hub.reference import resolve_reference
    from localgen.hub.resolve import expand_alias, is_installed, name_for_server, resolve_model

    files, model = str(expand_path(path).absolute()), without_latest(model)
    base = name_for_server(model) or model
    is_here = is_installed(model)
    if not is_here and resolve_reference(expand_alias(model)) is None:
        resolve_model(model)  # raises the error that says what is known
    add_adapter(name, parse_adapter({"path": files, "model": base, "scale": scale}))
    tables.print_line(f"{name} is an adapter of {model}: localgen chat {name}")
    if not is_here:
        tables.print_notice(f"{model} is not installed: localgen pull {model}")


@group.command("list")
def list_(json: JsonFlag = False) -> None:
    """List the adapters, their models and files."""
    from dataclasses import asdict

    from localgen.backends.terminal_text import escape_name
    from localgen.backends.units import format_size
    from localgen.cli import tables
    from localgen.hub.models_file import read_models_file

    known = read_models_file().adapters
    if json:
        records = [{"name": name, **asdict(entry)} for name, entry in known.items()]
        typer.echo(tables.json_text(records, indent=2))
        return
    rows = [
        (
            escape_name(name),
            escape_name(entry.model),
            f"{entry.scale:g}",
            format_size(entry.size_bytes) if Path(entry.path).exists() else "missing",
            escape_name(entry.path),
        )
        for name, entry in known.items()
    ]
    tables.print_table(("NAME", "MODEL", "SCALE", "SIZE", "PATH"), rows)


@group.command("rm")
def rm(name: AdapterName) -> None:
    """Remove an adapter. Its files and its model are kept."""
    from localgen.cli import tables
    from localgen.hub.adapters import remove_adapter

    removed = remove_adapter(name)
    tables.print_line(f"{name} is no longer an adapter; {removed.path} is kept")
