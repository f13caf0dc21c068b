"""`--url`: what a command is given to use another server, and what it then cannot be given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.chat.parameters import ModelOptions
from localgen.cli.options import LOAD_OPTIONS, REQUEST_OPTIONS

if TYPE_CHECKING:
    from localgen.client import ModelClient
    from localgen.client.endpoints import Endpoint

_REMOTE_PANEL = "Another server"
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Server of OpenAI's protocol to ask, as http://host:8000/v1; or a name that "
        "`localgen endpoint add` gave it.",
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
        help="Variable of the environment that holds its key.",
        metavar="VAR",
        envvar="LOCALGEN_API_KEY_ENV",
        show_envvar=False,
        rich_help_panel=_REMOTE_PANEL,
    ),
]
_LOCAL_ONLY_FIELDS = {"ctx", "priority", "keep_alive"}


def endpoint_from_options(
    context: typer.Context, url: str | None, api_key_env: str | None
) -> Endpoint | None:
    """The server that is meant; None: ours. InvalidRequest: it is none, or a flag is in vain."""
    if url is None:
        if _is_from_command_line(context, "api_key_env"):
            raise InvalidRequest("--api-key-env is for another server: give --url as well")
        return None
    for flag in (
        *LOAD_OPTIONS,
        *(flag for flag in REQUEST_OPTIONS if flag.field in _LOCAL_ONLY_FIELDS),
    ):
        if _is_from_command_line(context, flag.field):
            raise InvalidRequest(
                f"{flag.long_name} does not apply to a model on another server (--url): "
                "leave it out",
                param=flag.field,
            )
    from localgen.client.endpoints import resolve_endpoint, validate_env_var_name

    found = resolve_endpoint(url)
    return replace(found, key_env=validate_env_var_name(api_key_env)) if api_key_env else found


def options_for_endpoint(options: ModelOptions, endpoint: Endpoint | None) -> ModelOptions:
    """The options that reach the server. What the environment says of loading is about ours."""
    if endpoint is None:
        return options
    return replace(options, load=LoadOptions(), ctx=None, priority=0, keep_alive=None)


def create_client(endpoint: Endpoint | None, notify: Callable[[str], None]) -> ModelClient:
    """A client of that server; ours without one."""
    from localgen.client import Client, RemoteClient

    return Client(notify=notify) if endpoint is None else RemoteClient(endpoint, notify)


def _is_from_command_line(context: typer.Context, field: str) -> bool:
    source = context.get_parameter_source(field)
    return source is not None and source.name == "COMMANDLINE"
