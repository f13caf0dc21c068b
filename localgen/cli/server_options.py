"""Options of `localgen serve` and `localgen cluster up`: who may connect, and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from localgen.server.http.access import MAX_BODY_BYTES

TCP_PANEL = "Over TCP"
LIMITS_PANEL = "Limits"

KeepAlive = Annotated[
    str | None,
    typer.Option(
        help="Unload a model when idle for this time: 30s, 5m, 1h; -1: never (default: 5m)."
    ),
]
RecordTrace = Annotated[
    Path | None,
    typer.Option(
        help="Add a line to this file for each answered prompt, for `bench --trace`: its time, "
        "its lengths and hashes of its blocks, no text.",
        metavar="FILE",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File with API keys, one per line.", rich_help_panel=TCP_PANEL),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        help="Allowed CORS origin, e.g. https://chat.example; *: all (may be repeated).",
        metavar="<str>",
        rich_help_panel=TCP_PANEL,
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        help="Additional host name to accept in the Host header (may be repeated).",
        metavar="<str>",
        rich_help_panel=TCP_PANEL,
    ),
]
RateLimit = Annotated[
    str | None,
    typer.Option(
        help="Requests, or requests,tokens, per minute and API key; 0: no limit (default: 0).",
        metavar="N[,N]",
        rich_help_panel=LIMITS_PANEL,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        help="Maximum time per request in seconds (default: no limit).",
        metavar="SECONDS",
        min=0.001,
        rich_help_panel=LIMITS_PANEL,
    ),
]
MaxBody = Annotated[
    str | None,
    typer.Option(
        help=f"Maximum size of a request body (default: {MAX_BODY_BYTES >> 20}M).",
        metavar="SIZE",
        rich_help_panel=LIMITS_PANEL,
    ),
]
HangTimeout = Annotated[
    float | None,
    typer.Option(
        help="Kill an engine that sends nothing for this time while it has requests or loads "
        "a model, and load the model again at the next request; 0: never (default: 60).",
        metavar="SECONDS",
        min=0,
        rich_help_panel=LIMITS_PANEL,
    ),
]
