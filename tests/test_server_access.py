"""Access over TCP: keys, hosts, origins and limits."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import chat_body, wait_until
from tcp_server import AUTH, KEY, TcpServer, code, tcp_server

from localgen.config import BadSetting
from localgen.server import serving
from localgen.server.http.access import (
    AccessPolicy,
    RateLimit,
    is_loopback,
    open_tcp_socket,
    parse_rate_limit,
    read_api_keys,
)
from localgen.server.http.rate_limit import RateLimiter
from localgen.server.stats.request_log import RequestRecord


@pytest.fixture(scope="module")
def keyless() -> Iterator[TcpServer]:
    with tcp_server(max_body_bytes=1 << 16) as opened:
        yield opened


@pytest.fixture(scope="module")
def keyed() -> Iterator[TcpServer]:
    with tcp_server(
        keys=[KEY, "another-key-here"], cors_origins=["https://chat.example"]
    ) as opened:
        yield opened


def test_loopback_without_a_key(keyless: TcpServer) -> None:
    assert keyless.chat().json()["choices"][0]["message"]["content"] == "hello"


def test_the_socket_needs_no_key(keyed: TcpServer) -> None:
    assert keyed.harness.chat(keyed.model, "hello").status_code == 200


@pytest.mark.parametrize("key", [KEY, "another-key-here"])
def test_valid_keys_are_accepted(keyed: TcpServer, key: str) -> None:
    assert keyed.chat(Authorization=f"Bearer {key}").status_code == 200


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"],
)
def test_invalid_keys_are_rejected(keyed: TcpServer, header: str) -> None:
    reply = keyed.chat(Authorization=header) if header else keyed.chat()
    assert (reply.status_code, code(reply)) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert KEY not in reply.text


def test_a_key_in_anthropic_s_header(keyed: TcpServer) -> None:
    for headers, status in (
        ({"x_api_key": KEY}, 200),
        ({"x_api_key": KEY, "Authorization": "Bearer of-a-proxy"}, 200),
        ({"x_api_key": "wrong", "Authorization": f"Bearer {KEY}"}, 200),
        ({"x_api_key": f"{KEY}x"}, 401),
        ({"x_api_key": ""}, 401),
        ({"x_api_key": "wrong", "Authorization": "Bearer wrong"}, 401),
    ):
        assert keyed.chat(**headers).status_code == status, headers


def test_every_route_but_health_asks_for_a_key(keyed: TcpServer) -> None:
    paths = keyed.http.get("/openapi.json", headers=AUTH).json()["paths"]
    routes = [
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path, methods in paths.items()
        for method in methods
    ]
    assert {("POST", "/v1/messages"), ("POST", "/v1/responses"), ("GET", "/metrics")} <= {*routes}
    for method, path in (*routes, ("GET", "/openapi.json")):
        statuses = [
            keyed.http.request(method, path, headers=headers).status_code
            for headers in ({}, AUTH, {"x-api-key": KEY})
        ]
        is_open = path in ("/health", "/livez")
        assert (statuses[0] == 401) is not is_open, path
        assert 401 not in statuses[1:], path


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_nobody_can_pose_as_a_client_of_the_socket(keyed: TcpServer, name: str) -> None:
    for value in ("local", "local:1", "for=local"):
        assert keyed.http.get("/v1/models", headers={name: value}).status_code == 401


@pytest.mark.parametrize("query", [f"api_key={KEY}", f"key={KEY}", f"authorization=Bearer%20{KEY}"])
def test_key_in_the_query_is_rejected(keyed: TcpServer, query: str) -> None:
    assert keyed.http.get(f"/v1/models?{query}").status_code == 401


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/v1/stats", "/v1/loads", "/openapi.json", "/nothing"]
)
def test_every_path_needs_the_key(keyed: TcpServer, path: str) -> None:
    assert keyed.http.get(path).status_code == 401


def test_health_is_open(keyed: TcpServer) -> None:
    assert keyed.http.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    "name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST:1234", "10.0.0.7:80"]
)
def test_host_names_of_this_server_are_accepted(keyless: TcpServer, name: str) -> None:
    assert keyless.chat(Host=name).status_code == 200


@pytest.mark.parametrize("name", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", ""])
def test_foreign_host_names_are_rejected(keyless: TcpServer, name: str) -> None:
    reply = keyless.chat(Host=name)
    assert (reply.status_code, code(reply)) == (403, "forbidden_host")


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", (), b"400"),
        ("1.0", (), b"403"),
        ("1.1", ("localhost", "localhost"), b"400"),
        ("1.1", ("localhost", "evil.example"), b"400"),
        ("1.1", ("evil.example", "localhost"), b"400"),
        ("1.0", ("evil.example", "localhost"), b"400"),
    ],
)
def test_a_request_has_one_host(
    keyless: TcpServer, version: str, hosts: tuple[str, ...], status: bytes
) -> None:
    lines = "".join(f"Host: {host}\r\n" for host in hosts)
    said = f"GET /v1/models HTTP/{version}\r\n{lines}\r\n".encode()
    assert keyless.raw(said).startswith(b"HTTP/1.1 " + status)
    with socket.socket(socket.AF_UNIX) as local:
        local.connect(str(keyless.harness.settings.socket_path))
        local.sendall(said)
        # over the socket any host will do
        expected = b"200" if status == b"403" else status
        assert local.recv(1 << 16).startswith(b"HTTP/1.1 " + expected)


@pytest.mark.parametrize("path", ["health", "livez"])
def test_load_balancers_may_check_the_health_without_a_host(keyed: TcpServer, path: str) -> None:
    assert keyed.raw(f"GET /{path} HTTP/1.0\r\n\r\n".encode()).startswith(b"HTTP/1.1 200")
    named = f"GET /{path} HTTP/1.0\r\nHost: evil.example\r\n\r\n"
    assert keyed.raw(named.encode()).startswith(b"HTTP/1.1 403")


def test_requests_from_web_pages_are_rejected(keyless: TcpServer) -> None:
    reply = keyless.chat(Origin="https://evil.example")
    assert (reply.status_code, code(reply)) == (403, "forbidden_origin")
    assert "access-control-allow-origin" not in reply.headers


def test_allowed_origins_get_cors_headers(keyed: TcpServer) -> None:
    asks = {
        "Origin": "https://chat.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    before = keyed.http.options("/v1/chat/completions", headers=asks)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == "https://chat.example"
    reply = keyed.chat(Origin="https://chat.example", **AUTH)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"


def test_other_origins_get_no_cors_headers(keyed: TcpServer) -> None:
    asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    before = keyed.http.options("/v1/chat/completions", headers=asks)
    assert before.status_code == 400
    assert "access-control-allow-origin" not in before.headers
    assert keyed.chat(Origin="https://evil.example", **AUTH).status_code == 403


def test_body_with_too_large_a_length_is_rejected(keyless: TcpServer) -> None:
    said = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 1000000000\r\n\r\n{"
    )
    answer = keyless.raw(said)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"65,536 bytes" in answer


def test_chunked_body_that_is_too_large_is_rejected(keyless: TcpServer) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 8192

    reply = keyless.http.post(
        "/v1/chat/completions", content=endless(), headers={"Content-Type": "application/json"}
    )
    assert (reply.status_code, code(reply)) == (413, "too_large")
    assert keyless.chat().status_code == 200


@pytest.mark.parametrize(
    "rest",
    [b"X: " + b"y" * (1 << 18), b"".join(b"X-%d: y\r\n" % number for number in range(20_000))],
    ids=["long", "many"],
)
def test_large_headers_are_refused(keyless: TcpServer, rest: bytes) -> None:
    answer = keyless.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + rest)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"the headers exceed 65,536 bytes" in answer
    assert keyless.chat().status_code == 200


@pytest.mark.parametrize(
    "option", [{"kv_disk": 1}, {"kv_ram": 0}, {"kv_listen": "0.0.0.0:7000"}, {"kv_peer": "x:1"}]
)
def test_clients_over_tcp_do_not_set_what_is_kept_or_fetched(option: dict[str, object]) -> None:
    with tcp_server(keys=[KEY]) as opened:
        body = {"model": opened.model, "options": option}
        reply = opened.http.post("/v1/models/load", json=body, headers=AUTH)
        assert reply.status_code == 400
        assert "not for clients over TCP" in reply.json()["error"]["message"]
        assert opened.harness.http.post("/v1/models/load", json=body).status_code == 200


def test_slow_headers_time_out() -> None:
    with tcp_server() as opened:
        started_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", opened.port), timeout=30) as sock:
            sock.sendall(b"GET /health HT")
            assert sock.recv(1) == b""
        assert time.monotonic() - started_s > serving.HEADER_TIMEOUT_S - 1
        assert opened.chat().status_code == 200


def test_requests_per_minute_are_limited() -> None:
    with tcp_server(keys=[KEY, "another-key-here"], rate_limit=[2, None]) as opened:
        assert [opened.chat(**AUTH).status_code for _ in range(3)] == [200, 200, 429]
        reply = opened.chat(**AUTH)
        assert code(reply) == "rate_limited"
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        # another key has its own limit, and GET requests are not counted
        assert opened.chat(Authorization="Bearer another-key-here").status_code == 200
        assert opened.http.get("/v1/models", headers=AUTH).status_code == 200


# what --rate-limit does not count: cheap reads, and what ends work
UNCOUNTED = {
    *(("get", f"/{name}") for name in ("", "health", "livez", "metrics")),
    *(("get", f"/{name}") for name in ("models", "props", "slots", "version")),
    *(("get", f"/v1/{name}") for name in ("loads", "models", "models/{name}", "stats")),
    *(("get", f"/api/{name}") for name in ("tags", "ps", "version")),
    ("get", "/v1/responses/{response_id}"),
    *(("post", f"/v1/requests/{{request_id}}/{what}") for what in ("cancel", "answer-now")),
}


def test_the_rate_limit_counts_every_other_route() -> None:
    with tcp_server(rate_limit=[1, None]) as opened:
        assert opened.chat().status_code == 200
        paths = opened.harness.http.get("/openapi.json").json()["paths"]
        routes = {(method, path) for path, methods in paths.items() for method in methods}
        assert len(routes) > len(UNCOUNTED) > len(UNCOUNTED - routes) == 0
        limited = set()
        for method, path in routes:
            target = path.format(name="x", request_id="x", response_id="x") if "{" in path else path
            if opened.http.request(method, target).status_code == 429:
                limited.add((method, path))
        assert routes - limited == UNCOUNTED


def test_rejection_is_readable_before_the_body_is_sent(keyless: TcpServer) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 9000\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", keyless.port), timeout=10) as sock:
        sock.sendall(head)
        time.sleep(0.2)
        sock.sendall(b" " * 9000)
        time.sleep(0.2)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 403")


def test_rejection_does_not_wait_for_the_body(keyless: TcpServer) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 9000\r\n"
    assert keyless.raw(head + b"\r\n").startswith(b"HTTP/1.1 403")
    assert keyless.raw(head + b"Expect: 100-continue\r\n\r\n").startswith(b"HTTP/1.1 403")


def test_tokens_per_minute_are_limited() -> None:
    with tcp_server(keys=[KEY], rate_limit=[None, 10]) as opened:
        assert opened.chat("word " * 30, **AUTH).status_code == 200
        wait_until(lambda: opened.chat(**AUTH).status_code == 429)


def test_slow_request_times_out() -> None:
    with tcp_server(timeout_s=1.0) as opened:
        slow = opened.harness.named("slow", token_s=0.2)
        body = chat_body(slow, "word " * 100)
        reply = opened.http.post("/v1/chat/completions", json=body)
        assert (reply.status_code, code(reply)) == (504, "timeout")
        streamed = opened.http.post("/v1/chat/completions", json=body | {"stream": True})
        assert streamed.status_code == 200
        assert '"code":"timeout"' in streamed.text


def test_slow_load_times_out() -> None:
    with tcp_server(timeout_s=0.5) as opened:
        loading = opened.harness.named("loading", load_s=3600)
        reply = opened.http.post("/v1/chat/completions", json=chat_body(loading))
        assert (reply.status_code, code(reply)) == (504, "timeout")
        assert "while loading was loading, which continues" in reply.text
        embedding = {"model": loading, "input": "a"}
        assert code(opened.http.post("/v1/embeddings", json=embedding)) == "timeout"
        assert opened.harness.loaded() == ["loading"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/no/such/path", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions", 400),
        ("POST", "/api/chat", 400),
    ],
)
def test_every_response_has_an_id(keyless: TcpServer, method: str, path: str, status: int) -> None:
    replies = [keyless.http.request(method, path, content=b"{}") for _ in range(2)]
    assert [reply.status_code for reply in replies] == [status] * 2
    first, second = (reply.headers.get_list("x-request-id") for reply in replies)
    assert len(first) == len(second) == 1
    assert first != second


def test_a_refused_request_has_an_id() -> None:
    with tcp_server(keys=[KEY]) as opened:
        reply = opened.chat()
        assert reply.status_code == 401
        assert len(reply.headers["x-request-id"]) == 24


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_access_from_other_machines_requires_a_key(host: str) -> None:
    with pytest.raises(BadSetting, match="--api-key"):
        AccessPolicy(host=host, port=1).validate()
    AccessPolicy(host=host, port=1, keys=(KEY,)).validate()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_need_no_key(host: str) -> None:
    assert is_loopback(host)
    AccessPolicy(host=host, port=1).validate()


def test_connections_do_not_wait_for_acknowledgements() -> None:
    with open_tcp_socket(AccessPolicy(port=0)) as listener:
        address = listener.getsockname()[:2]
        with socket.create_connection(address), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("key", ["", "short", "with\nnewline-in-it"])
def test_invalid_keys_are_rejected_at_start(key: str) -> None:
    with pytest.raises(BadSetting, match="at least 8"):
        AccessPolicy(keys=(key,)).validate()


def test_key_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# mine\n{KEY}\n\n  another-key-here  \n")
    path.chmod(stat.S_IRUSR)
    assert read_api_keys(path) == (KEY, "another-key-here")
    path.chmod(0o644)
    with pytest.raises(BadSetting, match="chmod 600"):
        read_api_keys(path)
    with pytest.raises(BadSetting, match="No such file"):
        read_api_keys(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("60", RateLimit(60, None)),
        ("60,1000", RateLimit(60, 1000)),
        ("0,5", RateLimit(None, 5)),
        ("0", RateLimit()),
    ],
)
def test_rate_limits_are_parsed(text: str, limit: RateLimit) -> None:
    assert parse_rate_limit(text) == limit


@pytest.mark.parametrize("text", ["", "x", "1,2,3", "-1", "1.5"])
def test_invalid_rate_limits_are_rejected(text: str) -> None:
    with pytest.raises(BadSetting, match="--rate-limit"):
        parse_rate_limit(text)


def test_rate_limit_refills_over_time() -> None:
    now_s = [0.0]
    rates = RateLimiter(RateLimit(requests=2, tokens=100), lambda: now_s[0])
    assert rates.admit("a") is None
    entry = RequestRecord(id="x", requested_model="m", client="c", account="a", arrived_s=0.0)
    entry.num_tokens = 160
    rates.on_request_end(entry)
    # 60 tokens over the limit, and one to start with: 36.6 s at 100 per minute
    assert rates.admit("a") == pytest.approx(36.6)
    assert rates.admit("b") is None
    now_s[0] = 36.7
    assert rates.admit("a") is None


def test_a_port_in_use_is_one_line_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BadSetting) as refused:
            open_tcp_socket(AccessPolicy(host="127.0.0.1", port=port))
    assert str(refused.value) == (
        f"127.0.0.1:{port} is in use by another program: choose another --port"
    )
