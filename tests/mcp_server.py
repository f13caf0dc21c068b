"""MCP servers for tests, made with the package's server SDK: `python mcp_server.py KIND [PORT]`.

KIND: stdio, http; one that is broken from the start: hang, die; `listing JSON`: one with the tools
of a JSON text, whatever they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

NUM_FLOODED = 100_000
# the package keeps the descriptor 1 for itself
STDOUT = os.dup(1)


def hang() -> None:
    """Read everything, answer nothing, ignore the end of stdin and SIGTERM."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def write_raw(text: bytes) -> None:
    """Write beside the protocol, as broken servers do."""
    os.write(STDOUT, text)


def list_only(tools: object) -> None:
    """Answer without the package, which sends only valid lists."""
    initialized = {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "listing", "version": "1"},
    }
    results = {"initialize": initialized, "tools/list": {"tools": tools}}
    for line in sys.stdin:
        asked = json.loads(line)
        if (result := results.get(asked["method"])) is not None:
            reply: dict[str, object] = {"result": result}
        elif "id" in asked:
            reply = {"error": {"code": -32601, "message": "not there"}}
        else:
            continue
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"]} | reply), flush=True)


def serve(kind: str, port: int) -> None:
    from mcp.server.mcpserver import MCPServer
    from pydantic import BaseModel, Field

    class Shaped(BaseModel):
        text: str = Field(json_schema_extra={"pattern": "^(a+)+$"})

    globals()["Shaped"] = Shaped  # as annotations are looked up
    server = MCPServer("Test Server", log_level="CRITICAL")

    @server.tool()
    def echo(text: str) -> str:
        """Echo the input text"""
        return text

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers"""
        return a + b

    @server.tool()
    def repeat(text: str, times: int) -> str:
        """Repeat a text"""
        return text * times

    @server.tool()
    def fail() -> str:
        """Fail"""
        raise ValueError("no \x1b[31mred\x1b[0m today")

    @server.tool()
    def sleep(seconds: float, begun: str = "") -> str:
        """Sleep, and create a file before"""
        if begun:
            Path(begun).touch()
        time.sleep(seconds)
        return "slept"

    @server.tool()
    async def wait(begun: str, cancelled: str) -> str:
        """Wait until the call is cancelled, and create a file before and after"""
        Path(begun).touch()
        try:
            await asyncio.Event().wait()
        finally:
            Path(cancelled).touch()
        return ""

    @server.tool()
    def die() -> str:
        """End without an answer"""
        os.write(2, b"\x1b]0;title\x07out of luck\n")
        os._exit(3)

    @server.tool()
    def flood(kind: str) -> str:
        """Write much: a long line, many messages, or much on stderr"""
        message = b'{"jsonrpc":"2.0","method":"notifications/message","params":{}}\n'
        for _ in range(NUM_FLOODED):
            match kind:
                case "line":
                    write_raw(b"x" * 4096)
                case "messages":
                    write_raw(message)
                case "stderr":
                    os.write(2, b"y" * 4096)
                case "log":
                    write_raw(b"not a message\n")
        return "flooded"

    @server.tool()
    def environment() -> str:
        """The variables and the folder that the program has"""
        return "\n".join((os.getcwd(), *(f"{name}={text}" for name, text in os.environ.items())))

    @server.tool()
    def shaped() -> Shaped:
        """A result with a schema whose pattern takes hours to search"""
        return Shaped(text="a" * 40 + "!")

    if kind == "http":
        server.run("streamable-http", port=port)
    else:
        server.run("stdio")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["hang"]:
            hang()
        case ["listing", tools]:
            list_only(json.loads(tools))
        case ["die"]:
            os.write(2, b"\x1b[31mcannot open\x1b[0m the shop\n")
            sys.exit(1)
        case [kind, *rest]:
            serve(kind, int(rest[0]) if rest else 0)
