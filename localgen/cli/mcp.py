"""`localgen mcp`: servers of tools that a model may call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.arguments import JsonFlag
from localgen.cli.completion_values import complete_mcp_server

if TYPE_CHECKING:
    from localgen.config import BadSetting
    from localgen.mcp_tools.connections import McpConnections
    from localgen.mcp_tools.server_file import McpServer

ServerName = Annotated[
    str, typer.Argument(help="Name of the server.", autocompletion=complete_mcp_server)
]

group = typer.Typer(rich_markup_mode=None, add_completion=False)


@group.callback()
def mcp() -> None:
    """Manage MCP servers, whose tools a model may call; needs localgen[mcp].

    They are tables of mcp.toml in LOCALGEN_CONFIG_DIR, which may be edited. None is started unless
    --mcp of chat, run and tui, /mcp in a chat, or localgen mcp list names it.
    """


@group.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Name of the server.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Program and arguments of a server on stdin and stdout, after --."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a server of streamable HTTP.", metavar="URL")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Variable of the program; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            help="Header for the URL; ${VAR} in it is a variable of the environment; may be "
            "repeated.",
            metavar="'NAME: VALUE'",
        ),
    ] = None,
    cwd: Annotated[
        str | None,
        typer.Option(help="Folder of the program (default: the home folder).", metavar="PATH"),
    ] = None,
    tool: Annotated[
        list[str] | None,
        typer.Option(
            help="Offer the tools of this name or pattern only; may be repeated.", metavar="PATTERN"
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that a call may take (default: 60).")
    ] = None,
) -> None:
    """Add a server: localgen mcp add NAME -- COMMAND ARGS…, or localgen mcp add NAME --url URL."""
    from localgen.cli import tables
    from localgen.mcp_tools.server_file import (
        CALL_TIMEOUT_S,
        McpServer,
        add_server,
        validate_server,
    )

    server = McpServer(
        name=name,
        command=tuple(command or ()),
        url=url or "",
        env=_pairs(env, "=", "--env", "NAME=VALUE"),
        headers=_pairs(header, ":", "--header", "'NAME: VALUE'"),
        cwd=cwd or "",
        tools=tuple(tool or ("*",)),
        timeout_s=CALL_TIMEOUT_S if timeout is None else timeout,
    )
    validate_server(server)
    if server.command:
        server.program()  # raises if it is not found
    add_server(server)
    tables.print_line(f"{name} is {server.place}: localgen chat --mcp {name}")
    if server.headers and server.is_unencrypted:
        tables.print_notice(f"the headers of {name} are sent without encryption: use an https URL")


@group.command("list")
def list_(
    name: Annotated[
        str | None,
        typer.Argument(help="One server only.", autocompletion=complete_mcp_server),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Start the servers and list their tools, or why one failed; the exit status is then 1."""
    from localgen.cli import tables
    from localgen.cli.mcp_options import open_connections
    from localgen.cli.one_shot import stderr_console
    from localgen.mcp_tools.server_file import find_server, read_servers

    servers = read_servers() if name is None else {name: find_server(name)}
    listed = []
    with open_connections() as connections:
        for each, server in servers.items():
            with stderr_console().status(f"starting MCP server {each}"):
                listed.append(_examine(connections, each, server))
    if json:
        typer.echo(tables.json_text(listed, indent=2))
    elif listed:
        tables.print_table(("SERVER", "TOOL", "DESCRIPTION"), _rows(listed))
    else:
        tables.print_notice("no MCP servers: add one with localgen mcp add NAME -- COMMAND")
    if any(each["error"] for each in listed):
        raise typer.Exit(1)


def _rows(listed: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    from localgen.backends.terminal_text import collapse
    from localgen.mcp_tools.server_tools import short_name

    rows = [
        (each["name"], short_name(tool["name"]), collapse(tool["description"])[:80])
        for each in listed
        for tool in each["tools"]
    ]
    rows += [
        (each["name"], "-", f"warning: {text}") for each in listed for text in each["warnings"]
    ]
    rows += [(each["name"], "-", f"error: {each['error']}") for each in listed if each["error"]]
    return rows


@group.command("rm")
def rm(name: ServerName) -> None:
    """Remove a server from the list."""
    from localgen.cli import tables
    from localgen.mcp_tools.server_file import remove_server

    removed = remove_server(name)
    place = f" ({removed.place})" if removed else ""
    tables.print_line(f"{name} is no longer an MCP server{place}")


def _examine(
    connections: McpConnections, name: str, server: McpServer | BadSetting
) -> dict[str, Any]:
    """The tools of a server, or the error that it gave."""
    from localgen.config import BadSetting
    from localgen.mcp_tools.connections import McpServerFailed

    found: dict[str, Any] = {
        "name": name,
        "place": None,
        "tools": [],
        "warnings": [],
        "error": None,
    }
    if isinstance(server, BadSetting):
        return found | {"error": server.message}
    found["place"] = server.place
    try:
        listed = connections.start(server)
    except (McpServerFailed, BadSetting) as error:
        return found | {"error": error.message}
    tools = [{"name": tool.name, "description": tool.description} for tool in listed.tools]
    return found | {"tools": tools, "warnings": listed.warnings}


def _pairs(texts: list[str] | None, mark: str, option: str, form: str) -> dict[str, str]:
    found = {}
    for text in texts or ():
        name, found_mark, value = text.partition(mark)
        if not found_mark or not name.strip():
            raise InvalidRequest(f"{option}: give {form}")  # without the text: it may be a key
        found[name.strip()] = value.strip()
    return found
