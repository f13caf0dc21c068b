"""Requests that a client sends before the answer to its last one: bounded, and in order."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from serving import MANY_WORDS, chat_body, wait_until
from tcp_server import TcpServer, tcp_server

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
STREAM = b"GET /v1/stats?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n"
MIB = 1 << 20
# far more than the limit of 64 KB and what the kernel buffers
FLOOD_BYTES = 48 * MIB


@pytest.fixture(scope="module")
def opened() -> Iterator[TcpServer]:
    with tcp_server() as found:
        found.chat()
        yield found


def chat_request(model: str, text: str = "hello", **fields: object) -> bytes:
    body = json.dumps(chat_body(model, text, **fields)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def flood(sock: socket.socket, piece: bytes) -> None:
    """Send until the server stops reading or closes the connection."""
    sock.settimeout(0.5)
    with suppress(OSError):
        for _ in range(FLOOD_BYTES // len(piece)):
            sock.sendall(piece)


def read_to_end(sock: socket.socket, wait_s: float = 20.0) -> bytes:
    sock.settimeout(wait_s)
    received = b""
    with suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            received += piece
    return received


@pytest.mark.parametrize(
    ("begin", "rest"),
    [
        (LIVEZ + b"X: ", b"y" * 65_536),
        (LIVEZ, b"X: yyyyyyyyyyyyyyyyyyyyyyy\r\n" * 2_000),
        (b"GET /", b"y" * 65_536),
        (b"", (LIVEZ + b"\r\n") * 2_000),
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b" " * MIB),
    ],
    ids=["value", "lines", "url", "requests", "body"],
)
@pytest.mark.parametrize("together", [False, True])
def test_a_flood_behind_a_running_answer_is_bounded(
    opened: TcpServer, begin: bytes, rest: bytes, together: bool
) -> None:
    before = opened.server().memory_info().rss
    with opened.connect() as sock:
        sock.sendall(STREAM + (begin if together else b""))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        flood(sock, (b"" if together else begin) + rest)
        grown = opened.server().memory_info().rss - before
        # the answer goes on
        sock.settimeout(10)
        assert sock.recv(1 << 16)
    assert grown < 8 * MIB


@pytest.mark.parametrize("rest", [b"y" * 65_536, b"X: yyyyyyyyyyyyyyyyyyyyyyy\r\n" * 2_000])
def test_endless_trailers_close_the_connection(opened: TcpServer, rest: bytes) -> None:
    before = opened.server().memory_info().rss
    head = LIVEZ.replace(b"GET /livez", b"POST /v1/chat/completions")
    with opened.connect() as sock:
        sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: ")
        flood(sock, rest)
        assert opened.server().memory_info().rss - before < 8 * MIB
        assert read_to_end(sock) == b""


def test_trailers_do_not_become_headers(opened: TcpServer) -> None:
    """They follow the body, so nothing checks them."""
    body = json.dumps(chat_body(opened.model, "hello")).encode()
    head = LIVEZ.replace(b"GET /livez", b"POST /v1/chat/completions") + b"Connection: close\r\n"
    trailer = b"0\r\nContent-Type: text/plain\r\nHost: evil.example\r\n\r\n"
    said = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = opened.raw(head + said + b"%x\r\n" % len(body) + body + b"\r\n" + trailer)
    assert answer.startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(opened: TcpServer) -> None:
    words = [f"word{number}" for number in range(400)]
    said = [chat_request(opened.model, word, user=word) for word in words]
    last = LIVEZ + b"Connection: close\r\n\r\n"
    assert sum(map(len, said)) > 64 << 10
    with opened.connect() as sock:
        sock.sendall(b"".join(said) + last)
        answer = read_to_end(sock)
    assert answer.count(b"HTTP/1.1 200") == len(words) + 1
    places = [answer.index(b'"content":"%s"' % word.encode()) for word in words]
    assert places == sorted(places)


def test_a_large_body_behind_an_answer_arrives_whole(opened: TcpServer) -> None:
    text = " ".join(["w" * 2_000] * 900)
    last = LIVEZ + b"Connection: close\r\n\r\n"
    with opened.connect(wait_s=30) as sock:
        sock.sendall(chat_request(opened.model) + chat_request(opened.model, text) + last)
        answer = read_to_end(sock)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert text.encode() in answer


def test_headers_behind_an_answer_time_out_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_HEADER_S", "0.5")
    with tcp_server() as opened:
        unfinished = LIVEZ + b"X: " + b"y" * 10_000
        slow = opened.harness.named("slow", token_s=0.05)
        with opened.connect(wait_s=30) as sock:
            # the answer takes longer than the limit, which is not the client's fault
            sock.sendall(chat_request(slow, "word " * 30) + unfinished + b"\r\n\r\n" + unfinished)
            answer = read_to_end(sock)
        assert answer.count(b"HTTP/1.1 200") == 2
        assert opened.chat().status_code == 200


def test_large_headers_in_one_piece_are_refused(opened: TcpServer) -> None:
    head = LIVEZ + b"X: " + b"y" * 100_000 + b"\r\n\r\n"
    assert opened.raw(head).startswith(b"HTTP/1.1 431 ")
    assert opened.raw(LIVEZ + b"Connection: close\r\nX: " + b"y" * 60_000 + b"\r\n\r\n")


def test_a_lost_client_ends_an_answer_with_others_behind_it(opened: TcpServer) -> None:
    slow = opened.harness.named("lost", token_s=0.05)

    def active() -> int:
        return int(opened.harness.http.get("/health").json()["active_requests"])

    with opened.connect() as sock:
        sock.sendall(chat_request(slow, MANY_WORDS, stream=True) + (LIVEZ + b"\r\n") * 3)
        wait_until(lambda: active() == 1)
    wait_until(lambda: active() == 0)
