"""A server as a program: JSON lines on its stdin and stdout.

The package's own transport buffers a line of any length, and gives the terminal to the program's
stderr; here both are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import mcp_types
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from localgen.backends.terminal_text import collapse
from localgen.mcp_tools.server_file import McpServer

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

MAX_MESSAGE_BYTES = 8 << 20
MAX_BURST, MESSAGES_PER_S = 2_000, 100
_GRACE_S = 1.0
_TAIL_BYTES = 2_000


class LastWords:
    """The end of what a program wrote that is no message, and why it was ended, for errors.

    has_ended: no message will come any more.
    """

    def __init__(self) -> None:
        self._tail = b""
        self.reason = ""
        self.has_ended = False

    def add(self, written: bytes) -> None:
        self._tail = (self._tail + written)[-_TAIL_BYTES:]

    def __str__(self) -> str:
        """One line: the reason, else the last line written; may be empty."""
        if self.reason:
            return self.reason
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return collapse(lines[-1])[-300:] if lines else ""


@asynccontextmanager
async def stdio_transport(
    server: McpServer, last_words: LastWords
) -> AsyncIterator[TransportStreams]:
    """Run the program in a session of its own, so that Ctrl+C does not reach it.

    It gets the few variables that the package passes on, and those of the file. Raises BadSetting,
    OSError if it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        server.program(),
        *server.command[1:],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=get_default_environment() | server.expanded(server.env),
        cwd=server.folder(),
        start_new_session=True,
        limit=MAX_MESSAGE_BYTES,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, process.stdout, to_session, last_words)
        tasks.start_soon(_write, process.stdin, from_session, to_session)
        tasks.start_soon(_keep_tail, process.stderr, last_words)
        try:
            yield incoming, outgoing
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
            tasks.cancel_scope.cancel()


async def _read(
    stdout: asyncio.StreamReader,
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    last_words: LastWords,
) -> None:
    """Pass messages on until the program ends or sends too much; the session then sees an end."""
    async with to_session:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for line in _lines(stdout, last_words):
                try:
                    message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:  # a log line, as some programs print them
                    last_words.add(line)
                    continue
                await to_session.send(SessionMessage(message))


async def _lines(stdout: asyncio.StreamReader, last_words: LastWords) -> AsyncIterator[bytes]:
    """The lines until the end, or until the limit that `last_words` then has as the reason."""
    budget = _MessageBudget()
    try:
        while line := await stdout.readline():
            if not budget.take():
                last_words.reason = (
                    f"it sent more than {MAX_BURST:,} messages at once ({MESSAGES_PER_S} a second "
                    "are allowed)"
                )
                break
            yield line
    except ValueError:
        last_words.reason = f"it sent a message above {MAX_MESSAGE_BYTES >> 20} MB"
    last_words.has_ended = True


class _MessageBudget:
    """A token bucket: MAX_BURST messages at once, and MESSAGES_PER_S in the long run."""

    def __init__(self) -> None:
        self._left = float(MAX_BURST)
        self._counted_s = time.monotonic()

    def take(self) -> bool:
        """Count a message. Returns False if it is one too many."""
        now_s = time.monotonic()
        refilled = self._left + (now_s - self._counted_s) * MESSAGES_PER_S
        self._left, self._counted_s = min(MAX_BURST, refilled) - 1, now_s
        return self._left >= 0


async def _write(
    stdin: asyncio.StreamWriter,
    from_session: MemoryObjectReceiveStream[SessionMessage],
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    async with from_session:
        try:
            async for sent in from_session:
                line = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(line.encode() + b"\n")
                await stdin.drain()
        except OSError:  # the program has ended
            await to_session.aclose()


async def _keep_tail(stderr: asyncio.StreamReader, last_words: LastWords) -> None:
    while written := await stderr.read(1 << 16):
        last_words.add(written)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close stdin, then end the program and its children, as MCP describes a shutdown."""
    assert process.stdin
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await _has_ended(process):
            break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
    await _has_ended(process)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # children of a program that has ended by itself
    # asyncio leaves pipes open that a child of the program holds, too, and has no public way
    process._transport.close()  # type: ignore[attr-defined]


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    # not process.wait(): it also waits for pipes that a child may hold open
    with anyio.move_on_after(_GRACE_S):
        while process.returncode is None:
            await anyio.sleep(0.01)
    return process.returncode is not None
