"""The HTTP client of a server at a URL: bounded, and only to the host that the user named."""

from __future__ import annotations

import http
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urljoin

import httpx2
import mcp_types

from localgen.mcp_tools.server_file import McpServer

# of one response: a result, or a stream of events that is opened again
MAX_RESPONSE_BYTES = 32 << 20
_CONNECT_TIMEOUT_S = 10.0
_SESSION = "mcp-session-id"


class ResponseTooLarge(httpx2.TransportError):
    """A response exceeds MAX_RESPONSE_BYTES."""


def create_http_client(
    server: McpServer,
    on_unknown_session: Callable[[], None] = lambda: None,
    on_no_connection: Callable[[str], None] = lambda reason: None,
) -> httpx2.AsyncClient:
    """A client with the server's headers. Raises BadSetting if a variable in them is not set.

    on_unknown_session: called when the server does not know the session any more, as after a
    restart: status 404 to a request of the session (MCP 2025-06-18, session management).
    on_no_connection: called with the reason when a message is not answered, which the mcp package
    only logs, and with an empty one when it is. A status of HTTP is named in the error that a
    message then has.

    Redirects to another host fail: it would get the headers, and was not named by the user.
    """

    async def require_same_host(request: httpx2.Request) -> None:
        if _origin(request.url) != _origin(httpx2.URL(server.url)):
            raise httpx2.TooManyRedirects("it redirects to another host", request=request)

    async def watch_session(response: httpx2.Response) -> None:
        # other methods may have no resource there: only POST is for messages
        request = response.request
        if response.status_code == 404 and request.method == "POST" and _SESSION in request.headers:
            on_unknown_session()

    async def bound(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("it sends compressed data", request=response.request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)

    async def name_status(response: httpx2.Response) -> None:
        # of a session, the package needs to see it as it is
        if response.status_code == 404 and _SESSION in response.request.headers:
            return
        if response.status_code >= 400 and response.request.method == "POST":
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            is_json = response.headers.get("content-type", "").startswith("application/json")
            response.stream = _ErrorStream(response.stream, response.status_code, is_json)
            response.headers["content-type"] = "application/json"

    return _Client(
        on_no_connection,
        headers={**server.expanded(server.headers), "accept-encoding": "identity"},
        timeout=httpx2.Timeout(_CONNECT_TIMEOUT_S, read=None),  # calls have their own
        follow_redirects=True,
        event_hooks={
            "request": [require_same_host],
            "response": [watch_session, bound, name_status],
        },
    )


def _origin(url: httpx2.URL) -> str:
    return urljoin(str(url), "/")


class _Client(httpx2.AsyncClient):
    def __init__(self, on_no_connection: Callable[[str], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._on_no_connection = on_no_connection

    async def send(self, request: httpx2.Request, **settings: Any) -> httpx2.Response:
        is_message = request.method == "POST"
        try:
            response = await super().send(request, **settings)
        except httpx2.TransportError as error:
            if is_message:
                self._on_no_connection(str(error) or type(error).__name__)
            raise
        if is_message:
            self._on_no_connection("")
        return response


class _ErrorStream(httpx2.AsyncByteStream):
    """The body of a failed request: the JSON-RPC error in it, else one that names the status.

    is_json: by its type. Others are not read, as they may never end.
    """

    def __init__(self, stream: httpx2.AsyncByteStream, status: int, is_json: bool) -> None:
        self._stream = stream
        self._status, self._is_json = status, is_json

    async def __aiter__(self) -> AsyncIterator[bytes]:
        body = b"".join([chunk async for chunk in self._stream]) if self._is_json else b""
        yield body if _is_rpc_error(body) else self._error()

    def _error(self) -> bytes:
        is_known = self._status in set(http.HTTPStatus)
        phrase = f" {http.HTTPStatus(self._status).phrase}" if is_known else ""
        hint = ": check its headers in mcp.toml" if self._status in (401, 403) else ""
        # the codes that the package would give
        code = mcp_types.METHOD_NOT_FOUND if self._status == 404 else mcp_types.INTERNAL_ERROR
        error = {"code": code, "message": f"HTTP {self._status}{phrase}{hint}"}
        return json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()

    async def aclose(self) -> None:
        await self._stream.aclose()


def _is_rpc_error(body: bytes) -> bool:
    try:
        read = mcp_types.jsonrpc_message_adapter.validate_json(body, by_name=False)
    except ValueError:
        return False
    return isinstance(read, mcp_types.JSONRPCError)


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = 0
        async for chunk in self._stream:
            received += len(chunk)
            if received > MAX_RESPONSE_BYTES:
                raise ResponseTooLarge(f"it sent more than {MAX_RESPONSE_BYTES >> 20} MB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
