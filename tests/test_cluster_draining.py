"""The end of a gateway: running requests are answered or cut, new ones are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.types import Message
from test_cluster_gateway import (
    CHAT,
    MESSAGES,
    OLLAMA,
    Chooser,
    ScriptedServer,
    exchange,
    replica,
    text_of,
)

from localgen.cluster.gateway import Gateway
from localgen.cluster.route import Asked, Choice

__all__ = ["replica"]
LONG_S = 30.0


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not holds():
            await asyncio.sleep(0.01)


def test_new_requests_are_refused_and_running_ones_answered(replica: ScriptedServer) -> None:
    async def run() -> None:
        asked = Chooser(replica.url)
        gateway = Gateway(asked.choose, asked.ask_all)
        assert gateway.drain() == 0
        refused = await exchange(gateway, CHAT)
        assert refused[0]["status"] == 503
        assert dict(refused[0]["headers"])[b"retry-after"] == b"5"
        assert "the cluster is stopping" in text_of(refused)
        assert not replica.seen
        assert (await exchange(gateway, "/v1/requests/id1/cancel"))[0]["status"] == 200
        read = await exchange(gateway, "/v1/models", method="GET")
        assert read[0]["status"] == 501, "the answer of this replica to GET"
        health = await exchange(gateway, "/health", method="GET")
        assert (health[0]["status"], json.loads(text_of(health))) == (503, {"status": "stopping"})
        assert (await exchange(gateway, "/livez", method="GET"))[0]["status"] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "begins"),
    [
        (CHAT, 'data: {"error":'),
        (MESSAGES, 'event: error\ndata: {"type":"error"'),
        (OLLAMA, '{"error":'),
    ],
)
def test_a_stream_that_is_cut_ends_with_an_error(
    replica: ScriptedServer, path: str, begins: str
) -> None:
    async def run() -> list[Message]:
        asked = Chooser(replica.url)
        gateway = Gateway(asked.choose, asked.ask_all)
        running = asyncio.create_task(exchange(gateway, f"{path}?endless"))
        await until(lambda: bool(replica.seen))
        await asyncio.sleep(0.1)
        assert gateway.drain() == 1
        await gateway.end()
        assert gateway.drain() == 0
        assert asked.num_open == 0
        return await running

    text = text_of(asyncio.run(run()))
    assert text.startswith("data: one\n\n")
    error = text[text.rindex(begins) :]
    assert "the cluster is stopping: try again when it runs" in error
    assert replica.closed.wait(LONG_S), "the replica computes no more"


def test_a_request_that_waits_for_a_replica_is_refused() -> None:
    async def run() -> list[Message]:
        waits = asyncio.Event()

        @asynccontextmanager
        async def never(asked: Asked, gone: frozenset[str]) -> AsyncIterator[Choice]:
            waits.set()
            await asyncio.Event().wait()
            yield Choice("", "")

        gateway = Gateway(never, Chooser().ask_all)
        running = asyncio.create_task(exchange(gateway, CHAT))
        await waits.wait()
        await gateway.end()
        return await running

    sent = asyncio.run(run())
    assert sent[0]["status"] == 503
    assert "the cluster is stopping" in text_of(sent)
