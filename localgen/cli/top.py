"""`localgen top`."""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.remote_options import (
    KeyEnvOption,
    UrlOption,
    create_monitor,
    endpoint_from_options,
)


def command(
    context: typer.Context,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            metavar="METRIC:MS",
            help="Latency goal, ttft:500 or tpot:50 (ms); shows the share of requests that meet it "
            "(may be repeated).",
        ),
    ] = None,
) -> None:
    """Monitor the server: speed, latency, memory, requests. Does not start the server."""
    endpoint = endpoint_from_options(context, url, api_key_env)
    if endpoint is not None:
        endpoint.api_key()  # report a missing key before the screen opens
    # Textual draws on stderr
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise InvalidRequest("top needs a terminal: localgen ps lists models without one")
    gc.disable()  # imports make no garbage; BaseApp enables it after the first paint
    from localgen.config import ServerSettings
    from localgen.tui.base_app import BaseApp
    from localgen.tui.preferences import Preferences
    from localgen.tui.top.app import TopApp
    from localgen.tui.top.service_level import latency_goals

    goals = latency_goals(goodput or ())
    settings = ServerSettings.from_environment()
    make_monitor = partial(create_monitor, endpoint, settings)
    start_hint = "localgen chat or localgen serve starts one." if endpoint is None else ""
    where = "this machine" if endpoint is None else endpoint.display_name
    preferences = Preferences(BaseApp.preferences_file(settings.state_dir))
    TopApp(make_monitor, where, start_hint, preferences, goals=goals).run()
