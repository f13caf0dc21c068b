"""Hostile requests: each is rejected or bounded, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from serving import chat_body, wait_until
from starlette.types import Message, Receive, Scope, Send
from tcp_server import TcpServer, code, tcp_server

from localgen.server.http import guard, json_limits
from localgen.server.http.access import AccessPolicy, RateLimit
from localgen.server.http.guard import RequestRefused
from localgen.server.http.private_ports import PrivatePorts
from localgen.server.http.rate_limit import RateLimiter

JSON = {"Content-Type": "application/json"}
# processor time that the server may use while another client waits for /health; wall time
# would include other programs of this machine and this process itself
PATIENCE_S = 2.0
TURN = {"role": "user", "content": "hello there"}


@pytest.fixture(scope="module")
def opened() -> Iterator[TcpServer]:
    with tcp_server() as found:
        found.chat()
        yield found


@contextmanager
def others_are_answered(opened: TcpServer) -> Iterator[None]:
    """Request /health all the time while the block runs; each answer must come in time."""
    waits_s: list[float] = []
    done = threading.Event()
    server = opened.server()

    def computed_s() -> float:
        used = server.cpu_times()
        return float(used.user + used.system)

    def ask() -> None:
        with httpx.Client(base_url=str(opened.http.base_url), timeout=20, trust_env=False) as http:
            while not done.is_set():
                begun_s = computed_s()
                assert http.get("/health").status_code == 200
                waits_s.append(computed_s() - begun_s)
                time.sleep(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: len(waits_s) > 1)
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert max(waits_s) < PATIENCE_S


def post(opened: TcpServer, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return opened.http.post("/v1/chat/completions", content=content, headers=JSON)


def test_too_many_messages_are_rejected(opened: TcpServer) -> None:
    body = {"model": opened.model, "messages": [TURN] * 100_000}
    with others_are_answered(opened):
        reply = post(opened, body)
    assert (reply.status_code, code(reply)) == (413, "too_large")
    assert "16,384 objects" in reply.json()["error"]["message"]


def test_largest_number_of_messages_is_accepted(opened: TcpServer) -> None:
    body = {"model": opened.model, "messages": [TURN] * 16_000}
    with others_are_answered(opened):
        assert post(opened, body).status_code == 200


@pytest.mark.parametrize(
    "field",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 200_000}]},
        {"stop_token_ids": list(range(3_000_000))},
        {"logit_bias": {str(token): 1 for token in range(1_000_000)}},
        {"stop": ["x"] * 1_000_000},
        {"unknown": [{}] * 5_000_000},
    ],
    ids=["parts", "tokens", "biases", "stops", "unknown"],
)
def test_millions_of_elements_are_rejected(opened: TcpServer, field: dict[str, Any]) -> None:
    body = json.dumps(chat_body(opened.model, "a") | field).encode()
    with others_are_answered(opened):
        reply = post(opened, body)
    assert (reply.status_code, code(reply)) == (413, "too_large")


def test_limits_apply_on_the_socket(opened: TcpServer) -> None:
    body = {"model": opened.model, "messages": [TURN] * 100_000}
    reply = opened.harness.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 413


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
def test_deep_nesting_is_rejected(opened: TcpServer, depth: int) -> None:
    body = b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
    with others_are_answered(opened):
        assert post(opened, body).status_code in (400, 413)


def test_announced_gigabyte_is_rejected(opened: TcpServer) -> None:
    before = opened.server().memory_info().rss
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    sent = 0
    with opened.connect() as sock, suppress(ConnectionError):
        sock.sendall(head % (1 << 30))
        for _ in range(1 << 10):
            sent += sock.send(b" " * (1 << 20))
    assert sent < 1 << 26
    assert opened.server().memory_info().rss - before < 1 << 25


def test_unannounced_gigabyte_is_rejected(opened: TcpServer) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1 << 10):
            sent += 1 << 20
            yield b" " * (1 << 20)

    before = opened.server().memory_info().rss
    reply = opened.http.post("/v1/chat/completions", content=endless(), headers=JSON)
    assert (reply.status_code, code(reply)) == (413, "too_large")
    assert sent < 1 << 27
    # one body of the largest size, in its received parts
    assert opened.server().memory_info().rss - before < 1 << 27


def test_idle_connections_do_not_block_others(opened: TcpServer) -> None:
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(opened.connect())
        assert opened.chat().status_code == 200
        assert opened.harness.chat(opened.model, "a").status_code == 200


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="sets limits of another process")
def test_connections_beyond_the_file_limit_do_not_end_the_server() -> None:
    few = 128
    with tcp_server() as opened:
        resource.prlimit(opened.harness.pid(), resource.RLIMIT_NOFILE, (few, few))
        with ExitStack() as stack:
            socks = [stack.enter_context(opened.connect()) for _ in range(2 * few)]
            wait_until(lambda: sum(map(is_closed, socks)) >= len(socks) - few // 2)
            # the socket answers, and file descriptors are left for an engine
            assert opened.harness.chat(opened.harness.model("new"), "a").status_code == 200
        wait_until(lambda: opened.chat().status_code == 200)


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_client_that_does_not_read_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_STALL_S", "0.5")
    with tcp_server() as opened, socket.socket() as sock:
        body = json.dumps(chat_body(opened.model, " ".join(["w" * 20_000] * 900), stream=True))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", opened.port))
        sock.sendall((head + body).encode())

        def active() -> int:
            return int(opened.harness.http.get("/health").json()["active_requests"])

        wait_until(lambda: active() == 1)
        wait_until(lambda: active() == 0)


def test_slow_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.05)

    async def drops() -> Message:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def read() -> None:
        body = guard._LimitedBody(drops, guard.LargeBodyTurns(), 1000)
        while True:
            await body.receive()

    with pytest.raises(RequestRefused, match="longer than"):
        asyncio.run(read())


@pytest.mark.parametrize("expects", [False, True])
@pytest.mark.parametrize("key", ["", "none of ours"])
def test_rejection_is_sent_before_the_body_is_read(key: str, expects: bool) -> None:
    """Unread bytes reset the connection, which would discard a response in flight."""
    parts, order = 3 if key else 5, []

    async def receive() -> Message:
        order.append("read")
        left = parts - order.count("read")
        return {"type": "http.request", "body": b" " * 400, "more_body": left > 0}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            order.append("end" if not message.get("more_body") else "answer")

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive())["more_body"]:
                pass
        except RequestRefused as refused:
            await refused.to_response("/v1/models")(scope, receive, send)

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
    headers += [(b"expect", b"100-continue")] * expects
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/models",
        "headers": headers,
        "client": ("::1", 1),
        "server": ("::1", 1),
    }
    access = AccessPolicy(keys=("another key that it has",) if key else (), max_body_bytes=1000)
    ports = PrivatePorts(AsyncMock())
    guarded = guard.GuardMiddleware(reads, access, RateLimiter(RateLimit()), ports)
    asyncio.run(guarded(scope, receive, send))
    before = [] if key else ["read"] * 3
    # a client that waits for 100 Continue and did not get it sends nothing
    rest = 0 if key and expects else parts - len(before)
    assert order == [*before, "answer", *["read"] * rest, "end"]


@pytest.mark.parametrize(
    ("thing", "most"),
    [
        (TURN, json_limits.MAX_CONTAINERS),
        ([], json_limits.MAX_CONTAINERS),
        ({"a": '\\" {'}, json_limits.MAX_CONTAINERS),
        ("x", json_limits.MAX_STRINGS),
        (1, json_limits.MAX_VALUES),
    ],
)
def test_element_limit_by_kind(thing: object, most: int) -> None:
    assert json_limits.json_limit_error(json.dumps([thing] * (most - 1)).encode()) is None
    assert "the request has too many elements" in (
        json_limits.json_limit_error(json.dumps([thing] * (most + 2)).encode()) or ""
    )


@pytest.mark.parametrize(
    "text",
    ['{"a": [1, 2, {"b": "c"}]},\n' * 100_000, "\\" * 100_001, '\\"[{' * 50_000, "é[{" * 50_000],
)
def test_brackets_in_strings_are_not_counted(text: str) -> None:
    for ascii_only in (False, True):
        body = json.dumps(chat_body("tiny", text), ensure_ascii=ascii_only).encode()
        assert json_limits.json_limit_error(body) is None


def test_other_encodings_are_rejected() -> None:
    body = json.dumps([{"a": "b"}] * 20_000)
    for encoding in ("utf-16", "utf-16-le", "utf-32-be"):
        assert "UTF-8" in (json_limits.json_limit_error(body.encode(encoding)) or "")
