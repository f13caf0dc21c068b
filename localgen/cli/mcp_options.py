"""`--mcp` and `--mcp-allow`: the tools of a chat."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
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
def open_connections() -> Iterator[McpConnections]:
    """Connections whose servers end with the block, and with localgen at SIGTERM and SIGHUP.

    Programs run in sessions of their own, so that no signal of the terminal reaches them.
    """
    from localgen.mcp_tools.connections import McpConnections

    connections = McpConnections()
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if is_main and signal.getsignal(number) is signal.SIG_DFL
    ]

    def close() -> None:
        for number in numbers:  # one that comes now waits until the servers have ended
            signal.signal(number, lambda number, _: received.append(number))
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
        connections.close()
        if interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])

    def close_at_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        close()

    for number in numbers:
        signal.signal(number, close_at_signal)
    try:
        yield connections
    finally:
        close()


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
    with open_connections() as connections:
        yield start_servers(connections, names, allowed)


def start_servers(
    connections: McpConnections, names: list[str] | None, allowed: list[str] | None
) -> ChatTools:
    """The tools of the servers named on the command line. Raises as open_chat_tools()."""
    from localgen.cli.one_shot import stderr_console
    from localgen.cli.tables import print_notice
    from localgen.mcp_tools.chat_tools import ChatTools

    if allowed and not names:
        raise InvalidRequest("--mcp-allow needs --mcp NAME")
    tools = ChatTools(connections, allowed or ())
    for name in names or ():
        with stderr_console().status(f"starting MCP server {name}"):
            tools.add(name)
        for warning in tools.warnings(name):
            print_notice(warning)
    if unmatched := tools.unmatched_patterns():
        known = ", ".join(offered.title for each in tools.servers.values() for offered in each)
        raise InvalidRequest(f"--mcp-allow {unmatched[0]}: no such tool; tools are {known}")
    return tools
