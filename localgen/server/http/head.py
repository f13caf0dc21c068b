"""HEAD requests: as GET, without the body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


def answer_head(app: ASGIApp) -> ASGIApp:
    """Answer HEAD with the status and headers of GET. A stream ends after its headers."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await app(scope, receive, send)
            return
        is_complete = False

        async def send_head(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                await send(message)
            elif not is_complete:
                is_complete = True
                await send({"type": "http.response.body", "body": b""})

        await app({**scope, "method": "GET"}, receive, send_head)

    return handle
