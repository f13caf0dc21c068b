"""Requests that all replicas get: downloads and unloads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from starlette.types import Message
from test_cluster_gateway import (
    CHAT,
    OLLAMA,
    Chooser,
    ScriptedServer,
    exchange,
    replica,
    text_of,
)

from localgen.cluster.gateway import Gateway
from localgen.cluster.posted import Posted

__all__ = ["replica"]


def answered(machine: str, status: int = 200, **body: Any) -> Posted:
    return Posted(machine, status, json.dumps(body or {"status": "success"}).encode())


DISK_FULL = answered("b", 507, error="no space")
MISSING = [answered(name, 404, error="no such model") for name in ("a", "b")]
CHOSEN_LINES = [b'{"status":"one"}\n{"status":', b'"two"}\n', b'{"status":"success"}\n']


class Pulling:
    """A replica that streams a download, while all answer as given."""

    def __init__(self, *posted: Posted, status: int = 200) -> None:
        self.posted, self.status = posted, status
        self.asked: list[tuple[str, Any]] = []
        self.others = asyncio.Event()

    async def post_all(self, path: str, body: bytes) -> Sequence[Posted]:
        self.asked.append((path, json.loads(body)))
        await self.others.wait()
        return self.posted

    def transport(self, request: httpx.Request) -> httpx.Response:
        if self.status != 200 or json.loads(request.content).get("stream") is False:
            body = {"status": "success"} if self.status == 200 else {"error": "no such model"}
            return httpx.Response(self.status, stream=_Pieces([json.dumps(body).encode()]))
        headers = {"Content-Type": "application/x-ndjson"}
        return httpx.Response(200, headers=headers, stream=_Pieces(CHOSEN_LINES))

    def pull(self, **fields: Any) -> tuple[int, list[dict[str, str]]]:
        """The status and the lines of what the client gets."""

        async def run() -> list[Message]:
            chooser = Chooser("http://replica")
            gateway = Gateway(chooser.choose, chooser.ask_all, post_all=self.post_all)
            gateway._client = httpx.AsyncClient(transport=httpx.MockTransport(self.transport))
            asyncio.get_running_loop().call_later(0.05, self.others.set)
            return await exchange(gateway, "/api/pull", {"model": "owner/name", **fields})

        sent = asyncio.run(run())
        assert self.asked == [("/api/pull", {"model": "owner/name", **fields, "stream": False})]
        lines = text_of(sent).splitlines()
        return sent[0]["status"], [json.loads(line) for line in lines]


class _Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


@pytest.mark.parametrize(
    ("posted", "last"),
    [
        ([answered("a"), answered("b")], {"status": "success"}),
        ([answered("a"), DISK_FULL], {"error": "machine b: no space"}),
        (
            [answered("a"), Posted.from_answer(OSError("died"))],
            {"error": "the replica ended: try again"},
        ),
    ],
)
def test_a_pull_succeeds_when_all_machines_have_the_model(
    posted: list[Posted], last: dict[str, str]
) -> None:
    first = [{"status": "one"}, {"status": "two"}]
    assert Pulling(*posted).pull() == (200, [*first, last])
    status, lines = Pulling(*posted).pull(stream=False)
    assert lines == [last]
    assert (status == 200) == ("status" in last)


def test_a_pull_that_waits_for_another_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localgen.cluster.exchange._QUIET_S", 0.0)
    _, lines = Pulling(answered("a"), answered("b")).pull()
    waiting = "waiting for the other machines"
    assert [each["status"] for each in lines] == ["one", "two", waiting, "success"]


def test_a_model_that_no_machine_finds_is_refused_as_by_one() -> None:
    for fields in ({}, {"stream": False}):
        assert Pulling(*MISSING, status=404).pull(**fields) == (404, [{"error": "no such model"}])


def test_who_leaves_ends_the_download_of_all_machines(replica: ScriptedServer) -> None:
    ended = []

    async def post_all(path: str, body: bytes) -> Sequence[Posted]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(path)
        return []

    async def run() -> None:
        asked = Chooser(replica.url)
        gateway = Gateway(asked.choose, asked.ask_all, post_all=post_all)
        await exchange(gateway, "/api/pull?endless", {"model": "m"}, leaves=True)

    asyncio.run(run())
    assert ended == ["/api/pull"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/models/unload", {}),
        ("/api/generate", {"keep_alive": 0}),
        ("/api/chat", {"keep_alive": "0s", "messages": []}),
    ],
)
def test_a_model_is_unloaded_by_all_replicas(path: str, fields: dict[str, Any]) -> None:
    posted = [
        answered("a", unloaded=False),
        answered("b", unloaded=True),
        answered("c", 503, error="ending"),
    ]
    asked: list[tuple[str, Any]] = []

    async def post_all(path: str, body: bytes) -> Sequence[Posted]:
        asked.append((path, json.loads(body)))
        return posted

    async def run() -> list[Message]:
        chooser = Chooser("http://127.0.0.1:1")
        gateway = Gateway(chooser.choose, chooser.ask_all, post_all=post_all)
        return await exchange(gateway, path, {"model": "m", **fields})

    sent = asyncio.run(run())
    assert asked == [(path, {"model": "m", **fields})]
    assert (sent[0]["status"], json.loads(text_of(sent))) == (200, {"unloaded": True})
    posted[:] = [answered("a", 404, error="no such model")]
    sent = asyncio.run(run())
    assert (sent[0]["status"], json.loads(text_of(sent))) == (404, {"error": "no such model"})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"keep_alive": 0}),
        (OLLAMA, {"keep_alive": 0, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/generate", {"keep_alive": 0, "suffix": "b"}),
        ("/api/generate", {"keep_alive": "5m"}),
        ("/api/generate", {"keep_alive": "soon"}),
        ("/api/generate", {}),
    ],
)
def test_what_unloads_nothing_goes_to_one_replica(
    replica: ScriptedServer, path: str, fields: dict[str, Any]
) -> None:
    async def post_all(path: str, body: bytes) -> Sequence[Posted]:
        raise AssertionError(path)

    asked = Chooser(replica.url)
    gateway = Gateway(asked.choose, asked.ask_all, post_all=post_all)
    asyncio.run(exchange(gateway, path, fields))
    assert len(replica.seen) == 1
