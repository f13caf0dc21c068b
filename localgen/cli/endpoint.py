"""`localgen endpoint`: named remote servers."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.arguments import JsonFlag

EndpointName = Annotated[str, typer.Argument(help="Name of the endpoint.")]
UrlArgument = Annotated[str, typer.Argument(help="Base URL, e.g. http://host:8000/v1.")]
KeyEnvFlag = Annotated[
    str | None,
    typer.Option(help="Environment variable that holds the API key.", metavar="VAR"),
]
ModelFlag = Annotated[
    str | None, typer.Option(help="Default model on this server.", metavar="MODEL")
]

group = typer.Typer(rich_markup_mode=None, add_completion=False)


@group.callback()
def endpoint() -> None:
    """Manage named servers with an OpenAI-compatible API; --url accepts the names."""


@group.command("add")
def add(
    name: EndpointName, url: UrlArgument, key_env: KeyEnvFlag = None, model: ModelFlag = None
) -> None:
    """Add a named server. The API key is not stored, only the name of its environment variable."""
    from localgen.cli import tables
    from localgen.client import endpoints
    from localgen.client.endpoints import Endpoint, normalize_base_url, validate_env_var_name

    if model is not None and not (model.strip() and model.isprintable()):
        raise InvalidRequest("--model: give a model name")
    key = validate_env_var_name(key_env) if key_env is not None else None
    new = Endpoint(normalize_base_url(url), name, key, model)
    endpoints.add_endpoint(new)
    tables.print_line(f"{name} is {new.url}: localgen chat --url {name}")
    if key is not None and not os.environ.get(key):
        tables.print_notice(f"{key} is not set: export it before you use the endpoint")


@group.command("list")
def list_(json: JsonFlag = False) -> None:
    """List the named servers."""
    from localgen.cli import tables
    from localgen.client.endpoints import load_endpoints

    known = list(load_endpoints().values())
    if json:
        tables.print_json(known)
        return
    rows = [(each.name, each.url, _key_cell(each.key_env), each.model or "-") for each in known]
    tables.print_table(("NAME", "URL", "KEY", "MODEL"), rows)


@group.command("rm")
def rm(name: EndpointName) -> None:
    """Remove a named server from the list."""
    from localgen.cli import tables
    from localgen.client import endpoints

    endpoints.remove_endpoint(name)
    tables.print_line(f"{name} removed")


def _key_cell(key_env: str | None) -> str:
    if key_env is None:
        return "-"
    return f"${key_env}" if os.environ.get(key_env) else f"${key_env} (not set)"
