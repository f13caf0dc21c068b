"""`localgen cp`."""

from __future__ import annotations

from typing import Annotated

import typer

from localgen.cli.completion_values import complete_model


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="Model name or path; it need not be downloaded.", autocompletion=complete_model
        ),
    ],
    name: Annotated[str, typer.Argument(help="The alias.")],
) -> None:
    """Create an alias for a model. No files are copied or moved."""
    from localgen.cli import tables
    from localgen.hub import aliases
    from localgen.hub.latest_tag import without_latest
    from localgen.hub.metadata import read_metadata
    from localgen.hub.reference import resolve_reference
    from localgen.hub.resolve import is_installed, name_for_server, resolve_model

    model = without_latest(model)
    target = aliases.load_aliases().get(model, model)
    if resolve_reference(target) is None or is_installed(target):
        read_metadata(resolve_model(target))  # raises the error that says why it cannot be loaded
    aliases.add_alias(name, name_for_server(target) or target)
    tables.print_line(f"{name} is {target}")
