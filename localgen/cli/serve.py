"""`localgen serve`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated

import typer

from localgen.server.logs import LogFormat, formatter


def command(
    keep_alive: Annotated[
        str | None,
        typer.Option(help="How long an idle model stays loaded: 30s, 5m, 1h; -1: for ever."),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="Log lines for people, or JSON for programs.")
    ] = "text",
) -> None:
    """Run the server in the foreground until Ctrl+C, its log on standard error.

    It listens on the socket that chat and run look for; `localgen doctor` names it.
    """
    from localgen.config import Settings, parse_keep_alive
    from localgen.server.lifecycle import run

    settings = Settings.from_environment()
    if keep_alive is not None:
        settings = replace(settings, keep_alive_s=parse_keep_alive(keep_alive, "--keep-alive"))
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    run(settings, idle_exit=False)
