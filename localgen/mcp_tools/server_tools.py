"""The tools of a server: those that can be offered, and why others are not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from localgen.mcp_tools.server_file import McpServer

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import ReadStream, Transport, TransportStreams
    from mcp.shared.message import SessionMessage
    from mcp_types import Tool

_MAX_LISTED_TOOLS = 4_096
# of a tool; a longer one is not offered, as it would hide the arguments of a call
MAX_NAME_CHARS = 128
_MAX_DESCRIPTION_CHARS = 4_000
_NAMES_IN_WARNING, _NAME_START_CHARS = 10, 40
# the rules for a tool that all versions have
_TOOL_VERSION = "2025-11-25"


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool as its server describes it. parameters: JSON schema of its arguments, as text."""

    server: str
    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True)
class ServerTools:
    """The tools that a server offers. warnings: a line for each that cannot be offered, and for
    each pattern of mcp.toml that matches none."""

    tools: tuple[ServerTool, ...] = ()
    warnings: tuple[str, ...] = ()


class FaultyTool(NamedTuple):
    """A tool that breaks the rules of MCP."""

    name: str
    reason: str


async def list_tools(
    client: Client, server: McpServer, faulty: Sequence[FaultyTool]
) -> ServerTools:
    """The tools of a server that the patterns of mcp.toml match.

    faulty: filled by checked_transport() while the tools are listed.
    """
    listed: list[Tool] = []
    cursor: str | None = None
    while len(listed) < _MAX_LISTED_TOOLS:
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    matching = [tool for tool in listed if _is_matched(tool.name, server.tools)]
    tools = tuple(
        ServerTool(
            server.name,
            tool.name,
            (tool.description or tool.title or "")[:_MAX_DESCRIPTION_CHARS],
            json.dumps(tool.input_schema, ensure_ascii=False),
        )
        for tool in matching
        if len(tool.name) <= MAX_NAME_CHARS
    )
    too_long = (
        FaultyTool(
            tool.name, f"its name has {len(tool.name):,} characters, {MAX_NAME_CHARS} are allowed"
        )
        for tool in matching
        if len(tool.name) > MAX_NAME_CHARS
    )
    left_out = [*too_long, *(each for each in faulty if _is_matched(each.name, server.tools))]
    names = [*(tool.name for tool in listed), *(each.name for each in faulty)]
    return ServerTools(tools, tuple(_warnings(server, names, left_out)))


def _is_matched(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _warnings(server: McpServer, names: Sequence[str], left_out: Sequence[FaultyTool]) -> list[str]:
    if not names:
        return [f"MCP server {server.name} has no tools"]
    known = ", ".join(short_name(name) for name in names[:_NAMES_IN_WARNING])
    more = len(names) - _NAMES_IN_WARNING
    known += f" and {more:,} more" if more > 0 else ""
    unmatched = (
        f'MCP server {server.name}: "{pattern}" of tools in mcp.toml matches none of its tools: '
        f"{known}"
        for pattern in server.tools
        if not any(fnmatchcase(name, pattern) for name in names)
    )
    faults = (
        f"{server.name}.{short_name(name)} is not offered: {reason}" for name, reason in left_out
    )
    return [*unmatched, *faults]


def short_name(name: str) -> str:
    """The beginning of a long name of a tool."""
    return name if len(name) <= _NAME_START_CHARS else f"{name[:_NAME_START_CHARS]}…"


@asynccontextmanager
async def checked_transport(
    transport: Transport, faulty: list[FaultyTool]
) -> AsyncIterator[TransportStreams]:
    """A transport without the tools that break the rules of MCP, which it appends to `faulty`.

    The mcp package refuses a whole list because of one of them.
    """
    async with transport as (incoming, outgoing):
        yield _CheckedStream(incoming, faulty), outgoing


class _CheckedStream:
    def __init__(
        self, stream: ReadStream[SessionMessage | Exception], faulty: list[FaultyTool]
    ) -> None:
        self._stream = stream
        self._faulty = faulty

    @property
    def last_context(self) -> Any:
        """Of the sender, as the package's streams have it."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        return self._checked(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _CheckedStream:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return self._checked(await self._stream.__anext__())

    async def __aenter__(self) -> _CheckedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._stream.__aexit__(exc_type, exc_val, exc_tb)

    def _checked(self, received: SessionMessage | Exception) -> SessionMessage | Exception:
        from mcp.shared.message import SessionMessage
        from mcp_types import JSONRPCResponse

        message = None if isinstance(received, Exception) else received.message
        if not isinstance(message, JSONRPCResponse):
            return received
        listed = message.result.get("tools")  # a result of other requests has no such field
        if not isinstance(listed, list):
            return received
        found = [_fault(tool, position) for position, tool in enumerate(listed, 1)]
        if not any(found):
            return received
        self._faulty += filter(None, found)
        kept = [tool for tool, fault in zip(listed, found, strict=True) if fault is None]
        checked = message.model_copy(update={"result": message.result | {"tools": kept}})
        assert isinstance(received, SessionMessage)
        return SessionMessage(checked, received.metadata)


def _fault(tool: object, position: int) -> FaultyTool | None:
    """What is wrong with a tool; None if nothing is."""
    from mcp_types.methods import validate_server_result
    from pydantic import ValidationError

    try:
        validate_server_result("tools/list", _TOOL_VERSION, {"tools": [tool]})
    except ValidationError as error:
        name = tool.get("name") if isinstance(tool, dict) else None
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"][2:]))  # below tools.0
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        return FaultyTool(name if isinstance(name, str) else f"tool {position}", reason)
    return None
