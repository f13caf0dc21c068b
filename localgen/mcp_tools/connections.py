"""Connections to MCP servers, in a thread with an event loop that owns them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from localgen import __version__
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import collapse
from localgen.mcp_tools.results import ToolResult, read_result
from localgen.mcp_tools.server_file import McpServer
from localgen.mcp_tools.server_tools import (
    FaultyTool,
    ServerTools,
    checked_transport,
    list_tools,
)

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import Transport
    from mcp_types import CallToolResult

START_TIMEOUT_S = 30.0
_MAX_REASON_CHARS = 300
# loggers of the package: they would write on the terminal
_LOGGERS = ("mcp", "client", "httpx2")
_CLOSE_TIMEOUT_S = 6.0
# of the package, when the connection ends
_CLOSED_MESSAGE = "Connection closed"
_Result = TypeVar("_Result")


class McpServerFailed(LocalgenError):
    """A server could not be started, or did not answer as MCP has it."""

    code = "mcp_server_failed"


class McpConnections:
    """Starts servers, calls their tools, and ends them. Methods may be called from any thread.

    start_timeout_s: for a server's first answer and the list of its tools.
    """

    def __init__(self, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._start_timeout_s = start_timeout_s
        self._lock = threading.RLock()  # a signal's handler may close() in the thread that has it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connections: dict[str, _Connection] = {}
        self._starting: dict[str, asyncio.Lock] = {}
        self._is_closing = False

    def start(self, server: McpServer) -> ServerTools:
        """Start a server, unless it runs, and return its tools with warnings.

        Raises McpServerFailed, BadSetting; InvalidRequest if the mcp package is missing.
        """
        future = self.begin_start(server)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # at Ctrl+C
            raise

    def begin_start(self, server: McpServer) -> Future[ServerTools]:
        """As start(), without waiting. Cancelling ends the start.

        A server of this name that was defined otherwise is ended: the last definition counts.
        """
        return self._submit(self._start(server))

    def call(self, server: McpServer, tool: str, arguments: dict[str, Any]) -> Future[ToolResult]:
        """Call a tool; starts the server again if it has ended. Cancelling ends the call.

        A failure of the server is a result, too; so is another definition of it since.
        """
        return self._submit(self._call(server, tool, arguments))

    def close(self) -> None:
        """End all servers; waits for them a few seconds at most."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end_all(), loop).result(_CLOSE_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            loop.close()

    def _submit(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        with self._lock:
            if self._loop is None:
                try:
                    _prepare_package()
                except InvalidRequest:
                    work.close()
                    raise
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="mcp", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    # -- in the thread ---------------------------------------------------------------------------

    async def _start(self, server: McpServer) -> ServerTools:
        return (await self._running(server, is_new=True)).tools

    async def _running(self, server: McpServer, *, is_new: bool = False) -> _Connection:
        """The connection to a server, which is started if it does not run.

        is_new: the definition is the last one. Raises McpServerFailed, if not, for another one.
        """
        async with self._starting.setdefault(server.name, asyncio.Lock()):
            found = self._connections.get(server.name)
            if found is not None and found.server != server and not is_new:
                raise McpServerFailed(_redefined(server.name))
            if found is not None and found.is_running and found.server == server:
                return found
            if found is not None:
                await found.end("" if found.server == server else _redefined(server.name))
            if self._is_closing:
                raise McpServerFailed("localgen is ending")
            new = self._connections[server.name] = _Connection(server)
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await new.opened()
            except TimeoutError:
                await new.end()
                raise McpServerFailed(
                    f"MCP server {server.name} ({server.place}) did not answer within "
                    f"{self._start_timeout_s:g} s{new.hint}"
                ) from None
            except BaseException:
                await new.end()
                raise
            return new

    async def _call(self, server: McpServer, tool: str, arguments: dict[str, Any]) -> ToolResult:
        try:
            connection = await self._running(server)
        except LocalgenError as error:
            # the model need not know the command line, which may have keys
            return ToolResult(error.message.replace(f" ({server.place})", ""), failed=True)
        return await connection.call(tool, arguments)

    async def _end_all(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(each.end() for each in self._connections.values()))


class _Connection:
    """A running server. tools: those that the user's file allows; known once opened."""

    def __init__(self, server: McpServer) -> None:
        from localgen.mcp_tools.stdio import LastWords

        self.server = server
        self.tools = ServerTools()
        self._last_words = LastWords()
        self._client: Client | None = None
        self._is_lost = False
        self._no_connection = ""
        self._opened = asyncio.Event()
        self._ending = asyncio.Event()
        # one task enters and leaves the connection, as the package needs it
        self._task = asyncio.create_task(self._run())

    @property
    def is_running(self) -> bool:
        return (
            self._opened.is_set()
            and not self._task.done()
            and not self._is_lost
            and not self._last_words.has_ended
        )

    @property
    def hint(self) -> str:
        """The last words of the program for a message; empty if there are none."""
        return f": {self._last_words}" if str(self._last_words) else ""

    async def opened(self) -> None:
        """Wait until the tools are known. Raises McpServerFailed, BadSetting."""
        waiting = asyncio.create_task(self._opened.wait())
        try:
            await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done():
            error = self._task.exception()
            if isinstance(error, LocalgenError):
                raise error
            raise McpServerFailed(
                f"MCP server {self.server.name} ({self.server.place}): {self._failure(error)}"
            )

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        assert self._client is not None
        limit_s = self.server.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return read_result(await self._client.call_tool(tool, arguments))
        except TimeoutError:
            return ToolResult(f"no result within {limit_s:g} s", failed=True)
        except Exception as error:  # of any kind, as the server is not ours
            place = f"{self.server.origin}: " if self.server.url else ""
            return ToolResult(f"{place}{self._failure(error)}", failed=True)

    async def end(self, reason: str = "") -> None:
        """End the server. reason: for calls that still run."""
        self._last_words.reason = self._last_words.reason or reason
        # cancelled once: again, it would interrupt the end of the program
        if not (self._opened.is_set() or self._ending.is_set()):
            self._task.cancel()
        self._ending.set()
        done, _ = await asyncio.wait((self._task,), timeout=_CLOSE_TIMEOUT_S / 2)
        if not done:
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=_CLOSE_TIMEOUT_S / 2)
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # it was reported, or comes from the end itself

    async def _run(self) -> None:
        from mcp import Client
        from mcp_types import Implementation

        info = Implementation(name="localgen", version=__version__)
        async with contextlib.AsyncExitStack() as stack:
            faulty: list[FaultyTool] = []
            transport = checked_transport(await self._transport(stack), faulty)
            # cache: a tool is listed once
            client = Client(transport, client_info=info, cache=None)
            self._client = await stack.enter_async_context(client)
            # by the package, against a schema of the server's, whose patterns may take for ever
            client.session.validate_tool_result = _accept  # type: ignore[method-assign]
            self.tools = await list_tools(self._client, self.server, faulty)
            self._opened.set()
            await self._ending.wait()

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Transport:
        from mcp.client.streamable_http import streamable_http_client

        from localgen.mcp_tools.http_client import create_http_client
        from localgen.mcp_tools.stdio import stdio_transport

        if self.server.command:
            return stdio_transport(self.server, self._last_words)
        client = create_http_client(self.server, self._on_unknown_session, self._on_no_connection)
        await stack.enter_async_context(client)
        return streamable_http_client(self.server.url, http_client=client)

    def _on_unknown_session(self) -> None:
        self._is_lost = True

    def _on_no_connection(self, reason: str) -> None:
        self._no_connection = reason

    def _failure(self, error: BaseException | None) -> str:
        """Why the server failed, in one line; notes whether the connection is closed."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        # the code alone is also one of those that servers choose for errors of their own
        is_closed = isinstance(error, MCPError) and (error.code, error.message) == (
            CONNECTION_CLOSED,
            _CLOSED_MESSAGE,
        )
        self._is_lost = self._is_lost or is_closed
        if is_closed and self._no_connection:
            return f"no connection: {self._no_connection}"
        if is_closed or self._last_words.reason:
            return f"it ended{self.hint}"
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return collapse(text)[:_MAX_REASON_CHARS] or type(error).__name__


def _redefined(name: str) -> str:
    return f"mcp.toml defines {name} otherwise now: /mcp {name} offers what it has"


async def _accept(name: str, result: CallToolResult) -> None:
    """Results are text for the model, whatever their schema."""


def _prepare_package() -> None:
    """Check that the package is there, and silence it. Raises InvalidRequest."""
    import importlib.metadata  # not at the start: 20 ms

    try:
        version = importlib.metadata.version("mcp")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not version.startswith("2."):
        found = f"mcp {version} is installed" if version else "it is not installed"
        raise InvalidRequest(
            f"MCP servers need the package mcp, version 2, and {found}: pip install 'localgen[mcp]'"
        )
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
