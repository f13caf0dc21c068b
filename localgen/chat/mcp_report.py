"""What /mcp says of the servers in use and of the others."""

from __future__ import annotations

from collections.abc import Collection

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import collapse
from localgen.mcp_tools.chat_tools import ChatTools, OfferedTool
from localgen.mcp_tools.server_file import McpServer, read_servers

_TOOL_CHARS = 120


def all_server_lines(tools: ChatTools) -> list[str]:
    """The tools that are offered, and the servers that are not in use."""
    in_use = tools.servers
    lines = [line for name in in_use for line in server_lines(tools, name)]
    return [*lines, *_other_server_lines(in_use)] or ["no MCP servers: localgen mcp add"]


def server_lines(tools: ChatTools, name: str) -> list[str]:
    """The tools that a server in use offers, and what is not offered."""
    lines = [_tool_line(tools, offered) for offered in tools.servers[name]]
    return [*(lines or [f"{name} is in use and offers no tools"]), *tools.warnings(name)]


def _other_server_lines(in_use: Collection[str]) -> list[str]:
    """The servers of mcp.toml that are not in use, what is wrong in it, and who is not there."""
    try:
        known = read_servers()
    except LocalgenError as error:
        return [error.message]
    wrong = [each.message for each in known.values() if not isinstance(each, McpServer)]
    unused = [
        name for name, each in known.items() if name not in in_use and isinstance(each, McpServer)
    ]
    hint = f"not in use: {', '.join(unused)}; /mcp NAME offers the tools of one"
    removed = [
        f"{name} is not in mcp.toml any more: /mcp off {name} offers its tools no more"
        for name in in_use
        if name not in known
    ]
    return [*removed, *([hint] if unused else ()), *wrong]


def _tool_line(tools: ChatTools, offered: OfferedTool) -> str:
    mark = "" if tools.asks_before(offered) else " (runs without a question)"
    line = f"{offered.title}{mark}: {collapse(offered.tool.description)}"
    return line if len(line) <= _TOOL_CHARS else f"{line[: _TOOL_CHARS - 1]}…"
