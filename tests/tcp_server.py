"""A real server over TCP with fake engines, as remote clients use it."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil
from serving import ServerHarness, chat_body, server_harness

KEY = "a-key-of-some-length"
AUTH = {"Authorization": f"Bearer {KEY}"}


# below the ports that the system gives to connections and to port 0, in any of the tests at once
PORTS = range(12_000, 32_000)


def free_port() -> int:
    """A port that a server can bind later: no connection of another test gets it meanwhile."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    message = "no free port found"
    raise AssertionError(message)


class TcpServer:
    """A server over TCP with a named fake model."""

    def __init__(self, built: ServerHarness, port: int) -> None:
        self.harness, self.port = built, port
        self.model = built.named("echo")
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)

    def chat(self, text: str = "hello", **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        body = chat_body(self.model, text)
        return self.http.post("/v1/chat/completions", json=body, headers=names)

    def connect(self, wait_s: float = 5.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=wait_s)

    def raw(self, said: bytes, *, wait_s: float = 5.0) -> bytes:
        """The bytes that the server sends until it closes the connection."""
        with self.connect(wait_s) as sock:
            sock.sendall(said)
            answer = b""
            while received := sock.recv(1 << 16):
                answer += received
            return answer

    def server(self) -> psutil.Process:
        return psutil.Process(self.harness.pid())


@contextmanager
def tcp_server(**access: object) -> Iterator[TcpServer]:
    with server_harness() as built:
        port = free_port()
        built.start(port=port, **access)
        opened = TcpServer(built, port)
        try:
            yield opened
        finally:
            opened.http.close()


def code(reply: httpx.Response) -> str:
    """The error code of a rejected request."""
    error: dict[str, str] = reply.json()["error"]
    assert error["message"]
    return error["code"]
