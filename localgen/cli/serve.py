"""`localgen serve`."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.chat.parameters import ModelOptions
from localgen.cli import completion_values, server_options
from localgen.cli.completion_values import complete_model
from localgen.cli.options import Stabilize, takes_serve_options
from localgen.server.http.access import DEFAULT_PORT, MAX_BODY_BYTES
from localgen.server.stats.request_log import LogFormat, create_log_formatter


@takes_serve_options
def command(
    options: ModelOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model to load at startup; others are loaded on request.",
            autocompletion=complete_model,
        ),
    ] = None,
    keep_alive: server_options.KeepAlive = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "-md",
            "--draft",
            help="Default speculative decoding: a draft model (used for models of its family), "
            "auto (the catalog's draft model), ngram (the n-gram drafter alone) or none "
            "(default: ngram).",
            metavar="<str>",
            autocompletion=completion_values.option_completer("draft"),
        ),
    ] = None,
    stabilize: Stabilize = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="Log format: plain text, or one JSON object per line.")
    ] = "text",
    record_trace: server_options.RecordTrace = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on (default: 127.0.0.1 if --port is given).",
            envvar="LOCALGEN_HOST",
            rich_help_panel=server_options.TCP_PANEL,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help=f"Port to listen on; 0: any (default: {DEFAULT_PORT} if --host is given).",
            envvar="LOCALGEN_PORT",
            metavar="<int>",
            min=0,
            max=65535,
            rich_help_panel=server_options.TCP_PANEL,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="API key that clients must send (may be repeated). It is visible in the process "
            "list: prefer LOCALGEN_API_KEY or --api-key-file.",
            envvar="LOCALGEN_API_KEY",
            metavar="<str>",
            rich_help_panel=server_options.TCP_PANEL,
        ),
    ] = None,
    api_key_file: server_options.ApiKeyFile = None,
    cors_origin: server_options.CorsOrigin = None,
    allow_host: server_options.AllowHost = None,
    rate_limit: server_options.RateLimit = None,
    timeout: server_options.Timeout = None,
    max_body: server_options.MaxBody = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of requests computed at once per model (default: 32; cuda: 256).",
            metavar="<int>",
            min=1,
            rich_help_panel=server_options.LIMITS_PANEL,
        ),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of waiting requests per model; more are rejected (default: 512).",
            metavar="<int>",
            min=1,
            rich_help_panel=server_options.LIMITS_PANEL,
        ),
    ] = None,
    hang_timeout: server_options.HangTimeout = None,
) -> None:
    """Run the server in the foreground until Ctrl+C; the log goes to standard error.

    The server listens on the Unix socket that the other commands use (`localgen doctor` prints its
    path), and over TCP if --host or --port is given. If MODEL cannot be loaded, the server exits.
    Requests that name no model get MODEL. The load options are for MODEL, also when it is loaded
    again; without MODEL, they are for every model. A request may ask for others.
    """
    _check_load_options(model, options.load)
    from localgen.config import ServerSettings, parse_keep_alive, parse_size
    from localgen.hub.resolve import draft_for_server, name_for_server
    from localgen.server.http.access import AccessPolicy, parse_rate_limit, read_api_keys
    from localgen.server.lifecycle import run_server
    from localgen.server.stats.trace_recorder import open_trace

    settings = ServerSettings.from_environment()
    if keep_alive is not None:
        settings = replace(settings, keep_alive_s=parse_keep_alive(keep_alive, "--keep-alive"))
    if hang_timeout is not None:
        settings = replace(settings, hang_timeout_s=hang_timeout or None)
    settings = replace(
        settings,
        parallel=parallel,
        max_queue=max_queue or settings.max_queue,
        draft=draft_for_server(draft),
        record_trace=None if record_trace is None else record_trace.absolute(),
    )
    if settings.record_trace is not None:
        os.close(open_trace(settings.record_trace))
    access = AccessPolicy(
        host=host or "127.0.0.1",
        port=DEFAULT_PORT if port is None and host else port,
        keys=(*(api_key or ()), *(read_api_keys(api_key_file) if api_key_file else ())),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allow_host or ()),
        rate_limit=parse_rate_limit(rate_limit or "0"),
        timeout_s=timeout,
        max_body_bytes=parse_size(max_body, "--max-body") if max_body else MAX_BODY_BYTES,
        stabilize=stabilize,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(create_log_formatter(log_format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    run_server(
        settings,
        access,
        idle_exit=False,
        model=name_for_server(model),
        load_options=options.load,
    )


def _check_load_options(model: str | None, options: LoadOptions) -> None:
    """Raise InvalidRequest for invalid ones, and for those of one model without a model."""
    from localgen.backends.memory.load_limits import validate_load_options

    validate_load_options(options)
    if model is None and (options.kv_listen or options.kv_peer):
        raise InvalidRequest(
            "--kv-listen and --kv-peer are of one model: localgen serve MODEL", param="kv_listen"
        )
    if model is None and options.chat_template is not None:
        raise InvalidRequest(
            "--chat-template is for one model: name it, localgen serve MODEL --chat-template FILE",
            param="chat_template",
        )
