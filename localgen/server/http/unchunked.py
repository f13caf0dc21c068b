"""Responses to HTTP/1.0, which has no chunks: a body without a length ends with the connection."""

from __future__ import annotations

from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def send_unchunked(cycle: RequestResponseCycle) -> None:
    """Let uvicorn send the response as it is, if the application gives no length.

    Call it before the response starts. uvicorn closes the connection after each one to HTTP/1.0.
    """
    send: Any = cycle.send
    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            has_length = any(name.lower() == b"content-length" for name, _ in headers)
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            # the length that uvicorn compares it with
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    setattr(cycle, "send", send_plain)  # noqa: B010 - uvicorn has no other way
