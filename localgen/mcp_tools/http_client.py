"""The HTTP client of a server at a URL: bounded, and only to the host that the user named."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from urllib.parse import urljoin

import httpx2

from localgen.mcp_tools.server_file import McpServer

# of one response: a result, or a stream of events that is opened again
MAX_RESPONSE_BYTES = 32 << 20
_CONNECT_TIMEOUT_S = 10.0
_SESSION = "mcp-session-id"


class ResponseTooLarge(httpx2.TransportError):
    """A response exceeds MAX_RESPONSE_BYTES."""


def create_http_client(
    server: McpServer, on_unknown_session: Callable[[], None] = lambda: None
) -> httpx2.AsyncClient:
    """A client with the server's headers. Raises BadSetting if a variable in them is not set.

    on_unknown_session: called when the server does not know the session any more, as after a
    restart: status 404 to a request of the session (MCP 2025-06-18, session management).

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

    return httpx2.AsyncClient(
        headers={**server.expanded(server.headers), "accept-encoding": "identity"},
        timeout=httpx2.Timeout(_CONNECT_TIMEOUT_S, read=None),  # calls have their own
        follow_redirects=True,
        event_hooks={"request": [require_same_host], "response": [watch_session, bound]},
    )


def _origin(url: httpx2.URL) -> str:
    return urljoin(str(url), "/")


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
