"""`localgen endpoint`: names for other servers."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.arguments import JsonFlag

NameArgument = Annotated[str, typer.Argument(help="What to call it.")]
UrlArgument = Annotated[str, typer.Argument(help="Where it is, as http://host:8000/v1.")]
KeyEnvFlag = Annotated[
    str | None,
    typer.Option(help="Variable of the environment that holds its key.", metavar="VAR"),
]
ModelFlag = Annotated[
    str | None, typer.Option(help="Model to ask there where none is named.", metavar="MODEL")
]

group = typer.Typer(rich_markup_mode=None, add_completion=False)


@group.callback()
def endpoint() -> None:
    """Names for other servers of OpenAI's protocol, which chat and run take with --url."""


@group.command("add")
def add(
    name: NameArgument, url: UrlArgument, key_env: KeyEnvFlag = None, model: ModelFlag = None
) -> None:
    """Give a server a name. Its key stays in the environment; only the variable's name is kept."""
    from localgen.client import endpoints
    from localgen.client.endpoints import Endpoint, normalize_base_url, validate_env_var_name

    if model is not None and not (model.strip() and model.isprintable()):
        raise InvalidRequest("--model: give the name of a model")
    key = validate_env_var_name(key_env) if key_env is not None else None
    new = Endpoint(normalize_base_url(url), name, key, model)
    endpoints.add_endpoint(new)
    typer.echo(f"{name} is {new.url}: localgen chat --url {name}")
    if key is not None and not os.environ.get(key):
        typer.echo(f"{key} is not set yet: export it before", err=True)


@group.command("list")
def list_(json: JsonFlag = False) -> None:
    """List the servers that have a name."""
    from localgen.cli import tables
    from localgen.client.endpoints import load_endpoints

    known = list(load_endpoints().values())
    if json:
        tables.print_json(known)
        return
    rows = [(each.name, each.url, _key_cell(each.key_env), each.model or "-") for each in known]
    tables.print_table(("NAME", "URL", "KEY", "MODEL"), rows)


@group.command("rm")
def rm(name: Annotated[str, typer.Argument(help="The name to forget.")]) -> None:
    """Forget a name. The server does not notice."""
    from localgen.client import endpoints

    endpoints.remove_endpoint(name)
    typer.echo(f"{name} is forgotten")


def _key_cell(key_env: str | None) -> str:
    if key_env is None:
        return "-"
    return f"${key_env}" if os.environ.get(key_env) else f"${key_env} (not set)"
