"""`--url` and `--api-key-env`: use a remote server, and reject options of the local one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.types import OVERFLOW_ERROR
from localgen.chat.parameters import ModelOptions
from localgen.cli.options import LOAD_OPTIONS, REQUEST_OPTIONS

if TYPE_CHECKING:
    from localgen.client import Client
    from localgen.client.endpoints import Endpoint
    from localgen.client.launch import EarlyLaunch
    from localgen.client.server_monitor import LocalServerMonitor, RemoteServerMonitor
    from localgen.config import ServerSettings

_REMOTE_PANEL = "Remote server"
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Base URL of an OpenAI-compatible server, e.g. http://host:8000/v1, a name added with "
        "`localgen endpoint add`, or `cluster` for your own cluster.",
        metavar="URL|NAME",
        envvar="LOCALGEN_URL",
        show_envvar=False,
        rich_help_panel=_REMOTE_PANEL,
    ),
]
KeyEnvOption = Annotated[
    str | None,
    typer.Option(
        "--api-key-env",
        help="Environment variable that holds the API key.",
        metavar="VAR",
        envvar="LOCALGEN_API_KEY_ENV",
        show_envvar=False,
        rich_help_panel=_REMOTE_PANEL,
    ),
]
_LOCAL_ONLY_FIELDS = {"ctx", "priority", "keep_alive", "on_overflow"}


def endpoint_from_options(
    context: typer.Context, url: str | None, api_key_env: str | None
) -> Endpoint | None:
    """Return the endpoint of --url, or None for the local server.

    Raises InvalidRequest if the URL or name is invalid, or if an option on the command line
    applies only to the local server. Such options from the environment are not errors.
    """
    if url is None:
        if is_from_command_line(context, "api_key_env"):
            raise InvalidRequest("--api-key-env is for a remote server: give --url as well")
        return None
    for flag in (
        *LOAD_OPTIONS,
        *(flag for flag in REQUEST_OPTIONS if flag.field in _LOCAL_ONLY_FIELDS),
    ):
        if is_from_command_line(context, flag.field):
            raise InvalidRequest(
                f"{flag.long_name} does not apply to a model on a remote server (--url): "
                "leave it out",
                param=flag.field,
            )
    from localgen.client.endpoints import resolve_endpoint, validate_env_var_name

    found = resolve_endpoint(url)
    return replace(found, key_env=validate_env_var_name(api_key_env)) if api_key_env else found


def options_for_endpoint(options: ModelOptions, endpoint: Endpoint | None) -> ModelOptions:
    """Drop the options that apply only to the local server; they may come from the environment."""
    if endpoint is None:
        return options
    return replace(
        options,
        load=LoadOptions(),
        ctx=None,
        priority=0,
        keep_alive=None,
        on_overflow=OVERFLOW_ERROR,
    )


def launch_server_early(endpoint: Endpoint | None) -> EarlyLaunch | None:
    """Launch the local server before the client is imported, unless an endpoint is used."""
    if endpoint is not None:
        return None
    from localgen.client.launch import launch_early
    from localgen.config import ServerSettings

    return launch_early(ServerSettings.from_environment())


def create_client(
    endpoint: Endpoint | None, notify: Callable[[str], None], early: EarlyLaunch | None = None
) -> Client:
    """Create a client of the endpoint, or of the local server if it is None.

    early: the local server, if it has been launched.
    """
    from localgen.client import Client, LocalClient
    from localgen.client.connection import RESTART_WAIT_S, EndpointConnection

    if endpoint is None:
        return LocalClient(notify=notify, early=early)
    return Client(EndpointConnection(endpoint, notify, restart_wait_s=RESTART_WAIT_S))


def create_monitor(
    endpoint: Endpoint | None, settings: ServerSettings
) -> LocalServerMonitor | RemoteServerMonitor:
    """Create a monitor of the endpoint, or of the local server if it is None."""
    from localgen.client.server_monitor import LocalServerMonitor, RemoteServerMonitor

    return LocalServerMonitor(settings) if endpoint is None else RemoteServerMonitor(endpoint)


def is_from_command_line(context: typer.Context, field: str) -> bool:
    source = context.get_parameter_source(field)
    return source is not None and source.name == "COMMANDLINE"
