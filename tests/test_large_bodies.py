"""Large request bodies are parsed one at a time, and other connections are served in between."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import AsyncMock

from starlette.types import Message, Receive, Scope, Send

from localgen.server.http.access import AccessPolicy, RateLimit
from localgen.server.http.guard import LARGE_BODY_BYTES, GuardMiddleware
from localgen.server.http.private_ports import PrivatePorts
from localgen.server.http.rate_limit import RateLimiter
from localgen.server.requests.caller import LOCAL_CLIENT

PARSE_S = 0.02


class Scene:
    """A guarded application that parses bodies; each blocks the event loop for PARSE_S.

    turns: the turns of the event loop, counted when a body was parsed.
    """

    def __init__(self) -> None:
        self.turns: list[int] = []
        self._turn = 0
        limiter, ports = RateLimiter(RateLimit()), PrivatePorts(AsyncMock())
        self._guard = GuardMiddleware(self._parse, AccessPolicy(), limiter, ports)

    async def _parse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert len(message["body"]) > 0
        time.sleep(PARSE_S)
        self.turns.append(self._turn)

    async def _post(self, body: bytes) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "http_version": "1.0",
            "headers": [],
            "client": (LOCAL_CLIENT, 1),
        }

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            raise AssertionError("the body is refused")

        await self._guard(scope, receive, send)

    async def _count_turns(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)

    async def post_at_once(self, *bodies: bytes) -> None:
        counting = asyncio.create_task(self._count_turns())
        await asyncio.gather(*map(self._post, bodies))
        counting.cancel()


def gaps(scene: Scene) -> list[int]:
    return [after - before for before, after in zip(scene.turns, scene.turns[1:], strict=False)]


def test_others_are_served_between_large_bodies() -> None:
    scene = Scene()
    asyncio.run(scene.post_at_once(*[b"x" * LARGE_BODY_BYTES] * 4))
    assert len(scene.turns) == 4
    assert min(gaps(scene)) > 3


def test_small_bodies_do_not_wait_for_large_ones() -> None:
    scene = Scene()
    asyncio.run(scene.post_at_once(*[b"x" * LARGE_BODY_BYTES] * 2, *[b"x"] * 3))
    assert len(scene.turns) == 5
    # a large one, the three small ones and, after a break, the other large one
    assert max(gaps(scene)[:3]) <= 1
    assert gaps(scene)[3] > 3


def test_a_client_that_leaves_does_not_keep_its_turn() -> None:
    scene = Scene()

    async def script() -> None:
        large = b"x" * LARGE_BODY_BYTES
        first, second = (asyncio.create_task(scene.post_at_once(large)) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait({first, second})
        await asyncio.wait_for(scene.post_at_once(large), 60)

    asyncio.run(script())
    assert len(scene.turns) == 2
