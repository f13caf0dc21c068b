"""`localgen serve`."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from localgen.cli import completion_values
from localgen.cli.completion_values import complete_model
from localgen.server.http.access import DEFAULT_PORT, MAX_BODY_BYTES
from localgen.server.stats.request_log import LogFormat, create_log_formatter

_TCP_PANEL = "Over TCP"
_LIMITS_PANEL = "Limits"


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model to load at once; others are loaded when they are asked for.",
            autocompletion=complete_model,
        ),
    ] = None,
    keep_alive: Annotated[
        str | None,
        typer.Option(help="How long an idle model stays loaded: 30s, 5m, 1h; -1: for ever."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "-md",
            "--draft",
            help="Who proposes tokens ahead where a request does not say: ngram, the text itself; "
            "a model beside it, for models of its family; auto, the catalog's choice; none.",
            metavar="<str>",
            autocompletion=completion_values.option_completer("draft"),
        ),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="Log lines for people, or JSON for programs.")
    ] = "text",
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 127.0.0.1 if only --port is given.",
            envvar="LOCALGEN_HOST",
            rich_help_panel=_TCP_PANEL,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help=f"Port to listen on; {DEFAULT_PORT} if only --host is given, 0: any.",
            envvar="LOCALGEN_PORT",
            min=0,
            max=65535,
            rich_help_panel=_TCP_PANEL,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that lets clients in (may be repeated). Others see it in the process list: "
            "better LOCALGEN_API_KEY, or a file.",
            envvar="LOCALGEN_API_KEY",
            rich_help_panel=_TCP_PANEL,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="A file with keys, one a line.", rich_help_panel=_TCP_PANEL),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web pages that may ask, as https://chat.example (may be repeated); *: all.",
            rich_help_panel=_TCP_PANEL,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that clients call this server by (may be repeated).",
            rich_help_panel=_TCP_PANEL,
        ),
    ] = None,
    rate_limit: Annotated[
        str,
        typer.Option(
            help="Requests, or requests,tokens, a minute for each key.",
            metavar="N[,N]",
            rich_help_panel=_LIMITS_PANEL,
        ),
    ] = "0",
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a request may take.", min=0.001, rich_help_panel=_LIMITS_PANEL
        ),
    ] = None,
    max_body: Annotated[
        str,
        typer.Option(
            help="Largest request, as 32M.", metavar="SIZE", rich_help_panel=_LIMITS_PANEL
        ),
    ] = f"{MAX_BODY_BYTES >> 20}M",
    parallel: Annotated[
        int | None,
        typer.Option(
            help="Most requests of a model computed at once.", min=1, rich_help_panel=_LIMITS_PANEL
        ),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(
            help="Waiting requests of a model beyond which more are refused.",
            min=1,
            rich_help_panel=_LIMITS_PANEL,
        ),
    ] = None,
) -> None:
    """Run the server in the foreground until Ctrl+C, its log on standard error.

    It listens on the socket that chat and run look for (`localgen doctor` names it), and over TCP
    if a host or a port is given. A model that is named and cannot be loaded ends it.
    """
    from localgen.config import ServerSettings, parse_keep_alive, parse_size
    from localgen.hub.resolve import draft_for_server, name_for_server
    from localgen.server.http.access import AccessPolicy, parse_rate_limit, read_api_keys
    from localgen.server.lifecycle import run_server

    settings = ServerSettings.from_environment()
    if keep_alive is not None:
        settings = replace(settings, keep_alive_s=parse_keep_alive(keep_alive, "--keep-alive"))
    settings = replace(
        settings,
        parallel=parallel,
        max_queue=max_queue or settings.max_queue,
        draft=draft_for_server(draft),
    )
    access = AccessPolicy(
        host=host or "127.0.0.1",
        port=DEFAULT_PORT if port is None and host else port,
        keys=(*(api_key or ()), *(read_api_keys(api_key_file) if api_key_file else ())),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allow_host or ()),
        rate_limit=parse_rate_limit(rate_limit),
        timeout_s=timeout,
        max_body_bytes=parse_size(max_body, "--max-body"),
    )
    handler = logging.StreamHandler()
    handler.setFormatter(create_log_formatter(log_format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    run_server(settings, access, idle_exit=False, model=name_for_server(model))
