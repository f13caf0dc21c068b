"""`localgen stop`."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from localgen.backends.errors import ModelNotFound, ServerUnavailable
from localgen.cli.completion_values import complete_running_model


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model to unload (default: stop the server).",
            autocompletion=complete_running_model,
        ),
    ] = None,
) -> None:
    """Unload a model. Without MODEL, stop the server and unload all models."""
    from localgen.cli import tables
    from localgen.client import LocalClient
    from localgen.hub.models_file import models_file_problem

    with closing(LocalClient()) as client:
        if model is None:
            tables.print_line("server stopped" if client.shutdown() else "no server is running")
        elif client.health() is None:
            raise ServerUnavailable(f"{model} is not loaded: no server is running")
        elif client.unload(model):
            tables.print_line(f"{model} unloaded")
        else:
            if problem := models_file_problem():  # it may be a name in it
                tables.print_notice(f"{problem}; the names in it are not known")
            loaded = ", ".join(running.name for running in client.running_models()) or "none"
            raise ModelNotFound(f"{model} is not loaded; loaded models: {loaded}")
