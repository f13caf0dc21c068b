"""HTTP as old, odd and broken clients speak it: HTTP/1.0, HEAD, compressed bodies, no HTTP."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator

import pytest
from serving import chat_body
from tcp_server import TcpServer, code, tcp_server

from localgen.server.http.access import host_and_port


@pytest.fixture(scope="module")
def opened() -> Iterator[TcpServer]:
    with tcp_server() as found:
        yield found


def post(version: str, path: str, body: object, *headers: str) -> bytes:
    """A request as its bytes."""
    text = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(text)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + text


def split(answer: bytes) -> tuple[str, bytes]:
    """Head in lower case, and body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode().lower(), body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"], ids=["events", "lines"])
def test_a_stream_for_http_1_0_is_not_chunked(opened: TcpServer, path: str) -> None:
    """It ends with the connection, which `raw` waits for."""
    body = chat_body(opened.model, "one two three", stream=True)
    head, old = split(opened.raw(post("1.0", path, body)))
    assert head.startswith("http/1.1 200 ")
    assert "transfer-encoding" not in head
    assert "content-length" not in head
    assert "connection: close" in head
    new_head, new = split(opened.raw(post("1.1", path, body, "Connection: close")))
    assert "transfer-encoding: chunked" in new_head
    chunks = [part for part in re.split(rb"\r\n[0-9a-f]*\r\n|^[0-9a-f]+\r\n", new) if part]
    texts = [b'"content":"' + word for word in (b"one", b" two", b" three")]
    for whole in (old, b"".join(chunks)):
        assert [whole.count(text) for text in texts] == [1, 1, 1]
    # nothing but events or lines: no sizes of chunks
    starts = {line[:5] for line in old.splitlines() if line}
    assert starts == ({b"data:"} if path.startswith("/v1") else {b'{"mod'})


def test_an_answer_for_http_1_0_has_its_length(opened: TcpServer) -> None:
    body = chat_body(opened.model, "one two")
    for keeps in ((), ("Connection: keep-alive",)):
        head, answer = split(opened.raw(post("1.0", "/v1/chat/completions", body, *keeps)))
        assert f"content-length: {len(answer)}" in head
        assert "transfer-encoding" not in head
        assert json.loads(answer)["choices"][0]["message"]["content"] == "one two"


def test_an_error_in_a_stream_for_http_1_0(opened: TcpServer) -> None:
    model = opened.harness.named("dies")
    body = chat_body(model, "one !die", stream=True)
    head, answer = split(opened.raw(post("1.0", "/v1/chat/completions", body)))
    assert head.startswith("http/1.1 200 ")
    assert b'"code":"engine_died"' in answer.splitlines()[-2]


GETS = ["/health", "/livez", "/metrics", "/v1/models", "/models", "/v1/stats", "/openapi.json"]


@pytest.mark.parametrize("path", [*GETS, "/", "/api/tags", "/api/version", "/version"])
def test_head_is_get_without_its_body(opened: TcpServer, path: str) -> None:
    head, got = opened.http.head(path), opened.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["x-request-id"]
    if path not in ("/metrics", "/v1/stats", "/health"):  # their figures change
        assert head.headers["content-length"] == got.headers["content-length"] != "0"


def test_head_of_a_stream_ends(opened: TcpServer) -> None:
    head = opened.http.head("/v1/stats?stream=true")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/chat/completions", 405), ("/nothing", 404), ("/v1/models/none", 404)]
)
def test_head_of_what_get_refuses(opened: TcpServer, path: str, status: int) -> None:
    assert opened.http.head(path).status_code == opened.http.get(path).status_code == status


@pytest.mark.parametrize(
    "said",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /\x01 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["nonsense", "version", "control", "header", "length", "TLS"],
)
def test_what_is_not_http_gets_an_error_as_json(opened: TcpServer, said: bytes) -> None:
    head, body = split(opened.raw(said))
    assert head.startswith("http/1.1 400 ")
    assert "content-type: application/json" in head
    assert f"content-length: {len(body)}" in head
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_request"
    assert "not an HTTP request" in error["message"]
    assert opened.chat().status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "deflate", "zstd"])
def test_a_compressed_body_is_refused_with_the_reason(opened: TcpServer, encoding: str) -> None:
    body = json.dumps(chat_body(opened.model, "a")).encode()
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    for http in (opened.http, opened.harness.http):
        reply = http.post("/v1/chat/completions", content=gzip.compress(body), headers=headers)
        assert (reply.status_code, code(reply)) == (415, "unsupported_encoding")
        assert "send the body uncompressed" in reply.json()["error"]["message"]
        plain = headers | {"Content-Encoding": "identity"}
        assert http.post("/v1/chat/completions", content=body, headers=plain).status_code == 200


def test_the_schema_promises_the_errors_that_are_sent(opened: TcpServer) -> None:
    schema = opened.http.get("/openapi.json").json()
    operations = {
        (method, path): operation
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    }
    assert not [where for where, each in operations.items() if "422" in each["responses"]]
    assert not {"HTTPValidationError", "ValidationError"} & set(schema["components"]["schemas"])
    for path, name, error in (
        ("/v1/chat/completions", "OpenAIError", {"message", "type", "param", "code"}),
        ("/v1/messages", "AnthropicError", {"type", "message"}),
    ):
        promised = operations["post", path]["responses"]["400"]["content"]["application/json"]
        assert promised["schema"] == {"$ref": f"#/components/schemas/{name}"}
        reply = opened.http.post(path, json={"model": 5})
        assert reply.status_code == 400
        described = schema["components"]["schemas"][name]
        assert set(reply.json()) == set(described["required"])
        assert (
            set(reply.json()["error"]) == error == set(described["properties"]["error"]["required"])
        )
    assert "400" in operations["post", "/api/chat"]["responses"]
    reply = opened.http.post("/api/chat", json={"model": 5})
    assert set(reply.json()) == set(schema["components"]["schemas"]["OllamaError"]["required"])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
PARTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
    },
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}],
    },
    "/api/chat": {"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]},
    "/api/generate": {"prompt": "a", "images": ["AA=="]},
    "/apply-template": {"messages": [{"role": "user", "content": [IMAGE]}]},
}


@pytest.mark.parametrize("path", PARTS)
def test_images_are_refused_with_the_reason(opened: TcpServer, path: str) -> None:
    reply = opened.http.post(path, json=PARTS[path] | {"model": opened.model})
    assert reply.status_code == 400
    assert "this model reads no images" in reply.text


def test_addresses_are_written_as_in_urls() -> None:
    assert host_and_port("127.0.0.1", 80) == "127.0.0.1:80"
    assert host_and_port("::1", 8080) == "[::1]:8080"
    assert host_and_port("localhost", 80) == "localhost:80"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_the_log_line_of_an_ipv6_listener_is_a_url() -> None:
    with tcp_server(host="::1") as opened:
        log = opened.harness.settings.log_path.read_text()
        assert f"listening on http://[::1]:{opened.port}\n" in log
