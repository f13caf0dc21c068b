"""A scripted MCP server over streamable HTTP, for answers that the package's own never gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOOL = {"name": "echo", "description": "", "inputSchema": {"type": "object"}}


class ScriptedMcpServer(ThreadingHTTPServer):
    """replies: status and JSON of each call of a tool; num_sessions: how many were begun.

    start_status: of a request that begins a session.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: list[tuple[int, dict[str, object] | None]] = []
        self.start_status = 200
        self.num_sessions = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/mcp"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedMcpServer

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        match asked.get("method"):
            case _ if self.server.start_status != 200:
                self._reply(self.server.start_status, None)
            case "initialize":
                self.server.num_sessions += 1
                result = {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "scripted", "version": "1"},
                }
                self._reply(200, {"result": result}, asked["id"])
            case "tools/list":
                self._reply(200, {"result": {"tools": [TOOL]}}, asked["id"])
            case "tools/call":
                self._reply(*self.server.replies.pop(0), asked["id"])
            case method if method is not None and method.startswith("notifications/"):
                self._reply(202, None)
            case _:
                self._reply(404, None)

    def do_GET(self) -> None:
        self._reply(404, None)

    do_DELETE = do_GET

    def _reply(self, status: int, body: dict[str, object] | None, request_id: object = 0) -> None:
        text = b"" if body is None else json.dumps({"jsonrpc": "2.0", "id": request_id} | body)
        written = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("mcp-session-id", f"session-{self.server.num_sessions}")
        if written:
            self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def scripted_mcp_server() -> Iterator[ScriptedMcpServer]:
    with ScriptedMcpServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
