"""`--mcp` and `--mcp-allow`: the tools of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams, excludes_tools
from localgen.cli.completion_values import complete_mcp_server

if TYPE_CHECKING:
    from localgen.mcp_tools.chat_tools import ChatTools
    from localgen.mcp_tools.connections import McpConnections

_PANEL = "Tools"
McpOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mcp",
        help="Offer the tools of this MCP server to the model; may be repeated.",
        metavar="NAME",
        autocompletion=complete_mcp_server,
        rich_help_panel=_PANEL,
    ),
]
McpAllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mcp-allow",
        help="Run these tools without asking, such as files.read or files.*; may be repeated.",
        metavar="SERVER.TOOL",
        rich_help_panel=_PANEL,
    ),
]


@contextmanager
def open_chat_tools(
    names: list[str] | None, allowed: list[str] | None, params: SamplingParams
) -> Iterator[ChatTools]:
    """Start the servers, and end them at the end of the block.

    params: of the answers. Raises InvalidRequest, also if they exclude tools; BadSetting,
    McpServerFailed.
    """
    if names and (kind := excludes_tools(params)):
        raise InvalidRequest(f"give only one of --mcp and --{kind}: both constrain answers")
    from localgen.mcp_tools.connections import McpConnections

    with closing(McpConnections()) as connections:
        yield start_servers(connections, names, allowed)


def start_servers(
    connections: McpConnections, names: list[str] | None, allowed: list[str] | None
) -> ChatTools:
    """The tools of the servers named on the command line. Raises as open_chat_tools()."""
    from localgen.cli.one_shot import stderr_console
    from localgen.mcp_tools.chat_tools import ChatTools

    if allowed and not names:
        raise InvalidRequest("--mcp-allow needs --mcp NAME")
    tools = ChatTools(connections, allowed or ())
    for name in names or ():
        with stderr_console().status(f"starting MCP server {name}"):
            tools.add(name)
    if unmatched := tools.unmatched_patterns():
        known = ", ".join(offered.title for each in tools.servers.values() for offered in each)
        raise InvalidRequest(f"--mcp-allow {unmatched[0]}: no such tool; tools are {known}")
    return tools
