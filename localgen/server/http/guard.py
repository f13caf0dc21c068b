"""Middleware that enforces access policy, rate limits and body limits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from functools import partial

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localgen.server.http import json_limits
from localgen.server.http.access import AccessPolicy
from localgen.server.http.errors import error_response
from localgen.server.http.head import answer_head
from localgen.server.http.private_ports import PrivatePorts
from localgen.server.http.rate_limit import RateLimiter
from localgen.server.requests.caller import (
    ACCOUNT_HEADER,
    AGE_HEADER,
    GATEWAY_HEADER,
    KEY_ACCOUNT_PREFIX,
    is_local_request,
)

# a request body must arrive within this time
BODY_TIMEOUT_S = 60.0
# below this size, parsing takes a few milliseconds at most
LARGE_BODY_BYTES = 1 << 14
# how much of a rejected body is read after the response: closing a connection with unread bytes
# resets it, and the client may lose the response
_LINGER_BYTES = 1 << 20
_LINGER_S = 1.0
# served without a key: they reveal only that a server is running
PUBLIC_PATHS = frozenset({"/health", "/livez"})
# not counted by --rate-limit: what reads the state of the server and computes nothing, and what
# relieves it
_UNCOUNTED_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_RELIEVING_PATH = re.compile(r"/v1/requests/[^/]+/(cancel|answer-now)")


class RequestRefused(HTTPException):
    """A rejected request. headers: additional response headers."""

    def __init__(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code

    def to_response(self, path: str) -> Response:
        """Build the error response for a request path."""
        # close: the unread rest of the body must not be parsed as another request
        headers = {"Connection": "close", **(self.headers or {})}
        return error_response(
            path, self.code, self.detail, status=self.status_code, headers=headers
        )


class GuardMiddleware:
    """Checks each request before the application sees it.

    Sets scope["account"]: a hash of the API key; the client address if no keys are required; empty
    on the Unix socket. Sets scope["is_gateway"]: True for the gateway of a cluster, which also says
    whose account it is, and changes scope["arrived_s"] to when it got the request.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: AccessPolicy,
        rate_limiter: RateLimiter,
        private_ports: PrivatePorts,
    ) -> None:
        self._access, self._rate_limiter = access, rate_limiter
        self._private_ports = private_ports
        self._app = answer_head(app)
        self._turns = LargeBodyTurns()
        self._tcp_app: ASGIApp = self._handle_tcp
        if access.cors_origins:
            self._tcp_app = CORSMiddleware(
                self._handle_tcp,
                allow_origins=access.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                # clients send headers of their own, such as x-stainless-os
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["account"], scope["is_gateway"] = "", False
        if is_local_request(scope):
            await self._handle(scope, _LimitedBody(receive, self._turns), send, _require_host)
        else:
            await self._tcp_app(scope, receive, send)

    async def _handle_tcp(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _LimitedBody(receive, self._turns, self._access.max_body_bytes)
        await self._handle(scope, body, send, self._check_access)

    async def _handle(
        self, scope: Scope, body: _LimitedBody, send: Send, check: Callable[[Scope], None]
    ) -> None:
        """Call the application unless check raises RequestRefused."""
        closes = False

        async def send_lingering(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                closes = (b"connection", b"close") in message["headers"]
            elif closes and not message.get("more_body"):
                await send({**message, "more_body": True})
                await body.drain(scope)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            check(scope)
            _require_plain_body(scope)
            body.check_length(scope)
        except RequestRefused as refused:
            await refused.to_response(scope["path"])(scope, body.receive, send_lingering)
            return
        await self._app(scope, body.receive, send_lingering)

    def _check_access(self, scope: Scope) -> None:
        _require_host(scope)
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host"), headers.get(b"origin")
        # load balancers may use HTTP/1.0; a browser always sends the host
        is_probe = host is None and scope["path"] in PUBLIC_PATHS
        if not is_probe and not self._access.allows_host(host or ""):
            message = f"host {(host or '')[:80]!r} is not allowed: add it with --allow-host"
            raise RequestRefused(403, "forbidden_host", message)
        if origin is not None and not self._access.allows_origin(origin):
            message = f"origin {origin[:80]!r} is not allowed: add it with --cors-origin"
            raise RequestRefused(403, "forbidden_origin", message)
        if scope["path"] in PUBLIC_PATHS:
            return
        scope["account"] = self._authenticate(scope, headers)
        if self._access.is_gateway(headers.get(GATEWAY_HEADER.encode(), "")):
            scope["is_gateway"] = True
            scope["account"] = headers.get(ACCOUNT_HEADER.encode(), scope["account"])
            age_ms = headers.get(AGE_HEADER.encode(), "0")
            scope["arrived_s"] -= int(age_ms) / 1e3 if age_ms.isdecimal() else 0.0
        if is_rate_limited(scope["method"], scope["path"]):
            wait_s = self._rate_limiter.admit(scope["account"])
            if wait_s is not None:
                seconds = math.ceil(wait_s)
                raise RequestRefused(
                    429,
                    "rate_limited",
                    f"rate limit reached: try again in {seconds} s",
                    {"Retry-After": str(seconds)},
                )

    def _authenticate(self, scope: Scope, headers: Mapping[bytes, str]) -> str:
        """Return the account of the request. Raises RequestRefused without a valid key."""
        port: int = scope["server"][1]
        accepts_key = self._access.accepts_key
        if self._private_ports.has(port):
            accepts_key = partial(self._private_ports.accepts_key, port)
        elif not self._access.keys:
            return str(scope["client"][0])
        given = _given_keys(headers)
        key = next(filter(accepts_key, given), None)
        if key is None:
            what = "invalid API key" if given else "an API key is required"
            message = f"{what}: send Authorization: Bearer KEY, or x-api-key: KEY"
            raise RequestRefused(401, "invalid_api_key", message, {"WWW-Authenticate": "Bearer"})
        # hashed: keys must not appear in logs
        return KEY_ACCOUNT_PREFIX + hashlib.sha256(key.encode(errors="replace")).hexdigest()[:12]


def _given_keys(headers: Mapping[bytes, str]) -> list[str]:
    """The API keys of a request: of OpenAI's header, then of Anthropic's."""
    authorization = headers.get(b"authorization", "")
    kind, _, key = authorization.partition(" ")
    keys = [key.strip() if kind.lower() == "bearer" else ""] if authorization else []
    return [*keys, headers[b"x-api-key"].strip()] if b"x-api-key" in headers else keys


def is_rate_limited(method: str, path: str) -> bool:
    """Return True if --rate-limit counts this request, whether or not there is such a route."""
    return method not in _UNCOUNTED_METHODS and _RELIEVING_PATH.fullmatch(path) is None


def _require_host(scope: Scope) -> None:
    """Raise RequestRefused unless a request has one Host header; HTTP/1.0 needs none."""
    num_hosts = sum(name.lower() == b"host" for name, _ in scope["headers"])
    if num_hosts > 1 or (num_hosts == 0 and scope["http_version"] != "1.0"):
        message = f"the request has {num_hosts or 'no'} Host headers: send one"
        raise RequestRefused(400, "invalid_request", message)


def _require_plain_body(scope: Scope) -> None:
    """Raise RequestRefused for a compressed body, whose size is unknown until it is unpacked."""
    for name, value in scope["headers"]:
        encoding = value.decode("latin-1").strip()
        if name.lower() == b"content-encoding" and encoding.lower() not in ("", "identity"):
            raise RequestRefused(
                415,
                "unsupported_encoding",
                f"Content-Encoding {encoding[:40]!r} is not supported: send the body uncompressed",
                {"Accept-Encoding": "identity"},
            )


class LargeBodyTurns:
    """Hands large bodies to the application one at a time.

    Parsing and validating one blocks the event loop. The next one waits for as long again, in which
    all other connections are served.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait for the turn of a body; the caller then parses it before it awaits anything."""
        await self._lock.acquire()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        # called once the body is parsed
        loop.call_soon(lambda: loop.call_later(loop.time() - began_s, self._lock.release))


class _LimitedBody:
    """A request body with limits on time, size and JSON elements. max_bytes: None: no limit."""

    def __init__(
        self, receive: Receive, turns: LargeBodyTurns, max_bytes: int | None = None
    ) -> None:
        self._receive, self._turns, self._max_bytes = receive, turns, max_bytes
        self._num_bytes, self._complete, self._receive_started = 0, False, False
        self._parts: list[bytes] = []
        self._deadline_s = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

    def check_length(self, scope: Scope) -> None:
        """Raise RequestRefused if Content-Length exceeds the limit."""
        for name, value in scope["headers"]:
            if name.lower() == b"content-length" and value.isdigit():
                self._require_size(int(value))

    async def receive(self) -> Message:
        if self._complete:  # only a disconnect can follow
            return await self._receive()
        self._receive_started = True
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise RequestRefused(
                408,
                "too_slow",
                f"the body took longer than {BODY_TIMEOUT_S:.0f} s to arrive",
            ) from None
        self._parts.append(message.get("body", b""))
        self._num_bytes += len(self._parts[-1])
        self._complete = not message.get("more_body", False)
        self._require_size(self._num_bytes)
        if self._complete:
            if self._num_bytes >= LARGE_BODY_BYTES:
                await self._turns.next()
            self._require_json_limits()
        return message

    async def drain(self, scope: Scope) -> None:
        """Read and discard the rest of the body, up to _LINGER_BYTES and _LINGER_S."""
        if not self._receive_started and any(name == b"expect" for name, _ in scope["headers"]):
            return  # the client waits for 100 Continue and sends nothing
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while not self._complete and size < _LINGER_BYTES:
                    message = await self._receive()
                    size += len(message.get("body", b""))
                    self._complete = not message.get("more_body", False)

    def _require_size(self, size: int) -> None:
        if self._max_bytes is not None and size > self._max_bytes:
            self._parts.clear()
            raise RequestRefused(
                413, "too_large", f"the body exceeds {self._max_bytes:,} bytes: shorten it"
            )

    def _require_json_limits(self) -> None:
        body = b"".join(self._parts)
        self._parts.clear()
        problem = json_limits.json_limit_error(body)
        if problem is not None:
            raise RequestRefused(413, "too_large", problem)
        problem = json_limits.json_depth_error(body)
        if problem is not None:
            raise RequestRefused(400, "invalid_request", problem)
