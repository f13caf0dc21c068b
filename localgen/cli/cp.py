"""`localgen cp`."""

from __future__ import annotations

from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.completion_values import complete_model


def command(
    model: Annotated[
        str, typer.Argument(help="A model, here or not.", autocompletion=complete_model)
    ],
    name: Annotated[str, typer.Argument(help="What to call it too.")],
) -> None:
    """Give a model another name. Its files stay where they are, there is one copy."""
    from localgen.hub import aliases
    from localgen.hub.reference import resolve_reference
    from localgen.hub.resolve import BUILT_IN_MODEL, is_installed, name_for_server

    if name == BUILT_IN_MODEL:
        raise InvalidRequest(f"{BUILT_IN_MODEL} is the built-in model: choose another name")
    meant = aliases.load_aliases().get(model, model)
    if resolve_reference(meant) is None and not is_installed(meant):
        from localgen.hub.resolve import resolve_model

        resolve_model(meant)  # it says why not
    aliases.add_alias(name, name_for_server(meant) or meant)
    typer.echo(f"{name} is {meant}")
