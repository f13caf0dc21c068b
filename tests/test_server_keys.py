"""API keys are compared in constant time: by hmac.compare_digest, whole, and each of them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Any, NoReturn
from unittest.mock import AsyncMock

import pytest
from starlette.types import Message, Receive, Scope, Send

from localgen.server.http.access import AccessPolicy, RateLimit
from localgen.server.http.guard import GuardMiddleware
from localgen.server.http.private_ports import PrivatePorts
from localgen.server.http.rate_limit import RateLimiter


class Secret(str):
    """A key that fails the test when anything but compare_digest compares it."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("compared in a time that depends on the key")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __contains__ = _refuse
    startswith = endswith = find = index = count = _refuse


KEYS = (
    Secret("a-key-of-some-length"),
    Secret("another-key-here"),
    Secret("a-third-key-that-is-long"),
)
SENT = {
    "first": ("a-key-of-some-length", 200),
    "last": ("a-third-key-that-is-long", 200),
    "same prefix": ("a-key-of-some-lengtx", 401),
    "shorter": ("a-key-of-some-lengt", 401),
    "longer": ("a-key-of-some-lengthx", 401),
    "other": ("0", 401),
    "not ASCII": ("a-key-of-some-lengtħ", 401),
}


def status(key: str, path: str = "/v1/models") -> int:
    """The status that the guard of a TCP server with KEYS answers to a key."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer " + key.encode())]
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "headers": headers}
    scope |= {
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
        "http_version": "1.1",
        "query_string": b"",
    }
    access, ports = AccessPolicy(port=1, keys=KEYS), PrivatePorts(AsyncMock())
    guard = GuardMiddleware(app, access, RateLimiter(RateLimit()), ports)
    asyncio.run(guard(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("kind", SENT)
def test_every_key_is_compared_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare: Callable[[bytes, bytes], bool] = hmac.compare_digest
    compared: list[tuple[bytes, bytes]] = []

    def record(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return compare(given, known)

    monkeypatch.setattr(hmac, "compare_digest", record)
    key, expected = SENT[kind]
    assert status(key) == expected
    given = key.encode().decode("latin-1").encode()  # as headers are decoded
    assert compared == [(given, known.encode()) for known in KEYS]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/api/tags", "/nothing"])
def test_nothing_else_decides(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A valid key is refused, and any other accepted, if compare_digest says so."""
    monkeypatch.setattr(hmac, "compare_digest", lambda given, known: False)
    assert {status(key, path) for key, _ in SENT.values()} == {401}
    monkeypatch.setattr(hmac, "compare_digest", lambda given, known: known == KEYS[1].encode())
    assert {status(key, path) for key, _ in SENT.values()} == {200}
