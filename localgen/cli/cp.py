"""`localgen cp`."""

from __future__ import annotations

from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.completion_values import any_model


def command(
    model: Annotated[str, typer.Argument(help="A model, here or not.", autocompletion=any_model)],
    name: Annotated[str, typer.Argument(help="What to call it too.")],
) -> None:
    """Give a model another name. Its files stay where they are, there is one copy."""
    from localgen.hub import aliases
    from localgen.hub.reference import reference
    from localgen.hub.resolve import BUILT_IN, for_server, is_here

    if name == BUILT_IN:
        raise InvalidRequest(f"{BUILT_IN} is the built-in model: choose another name")
    meant = aliases.aliases().get(model, model)
    if reference(meant) is None and not is_here(meant):
        from localgen.hub.resolve import resolve

        resolve(meant)  # it says why not
    aliases.add(name, for_server(meant) or meant)
    typer.echo(f"{name} is {meant}")
