"""`localgen stop`."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import LocalgenError, ModelNotFound, ServerUnavailable
from localgen.cli.completion_values import complete_running_model

if TYPE_CHECKING:
    from localgen.client import LocalClient


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
        with suppress(LocalgenError):  # what cannot say it can be stopped
            _announce_saving(client, model)
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


def _announce_saving(client: LocalClient, model: str | None) -> None:
    """Say on standard error that it may take a while: prefixes are to be written to the disk."""
    from localgen.backends.engine_stats import SAVE_TIMEOUT_S
    from localgen.backends.units import format_count
    from localgen.cli import tables
    from localgen.client.snapshot import parse_localgen_stats
    from localgen.hub.resolve import name_for_server

    if client.health() is None:
        return
    tiers = [
        tier
        for each in parse_localgen_stats(client.stats()).models
        if model is None or name_for_server(model) in (each.name, each.id, each.path)
        for tier in each.kv_tiers
        if tier.unsaved_tokens
    ]
    unsaved = sum(tier.unsaved_tokens for tier in tiers)
    if error := next((tier.error for tier in tiers if tier.error), ""):
        tables.print_notice(
            f"up to {format_count(unsaved, 'token')} of prefixes are lost: "
            f"the disk cannot be written: {error}"
        )
    elif unsaved:
        tables.print_notice(
            f"saving up to {format_count(unsaved, 'token')} of prefixes to disk, "
            f"for at most {SAVE_TIMEOUT_S:.0f} s"
        )
