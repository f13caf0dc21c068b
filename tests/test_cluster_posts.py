"""Requests that manage models, which all replicas get."""

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
from localgen.cluster.managing import ReplicaRequest
from localgen.cluster.posted import Place, Posted
from localgen.cluster.totals import merged_ps

__all__ = ["replica"]


def answered(machine: str, status: int = 200, **body: Any) -> Posted:
    place = Place(f"r-{machine}", machine, machine)
    return Posted(place, status, json.dumps(body or {"status": "success"}).encode())


DISK_FULL = answered("b", 507, error="no space")
MISSING = [answered(name, 404, error="no such model") for name in ("a", "b")]
CHOSEN_LINES = [b'{"status":"one"}\n{"status":', b'"two"}\n', b'{"status":"success"}\n']


class Pulling:
    """A replica that streams a download, while all answer as given."""

    def __init__(self, *posted: Posted, status: int = 200) -> None:
        self.posted, self.status = posted, status
        self.asked: list[tuple[str, Any]] = []
        self.others = asyncio.Event()

    async def send_all(self, command: ReplicaRequest) -> Sequence[Posted]:
        self.asked.append((command.path, json.loads(command.body)))
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
            gateway = Gateway(chooser.choose, chooser.ask_all, send_all=self.send_all)
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
        ([answered("a"), DISK_FULL], {"error": "replica r-b on b: no space"}),
        (
            [answered("a"), Posted.without_answer(Place("r", "b", "b"), "it has ended")],
            {"error": "replica r on b: it has ended: try again"},
        ),
        (
            [answered("a"), Posted.without_answer(None, "it does not answer")],
            {"error": "a replica: it does not answer: try again"},
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

    async def send_all(command: ReplicaRequest) -> Sequence[Posted]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(command.path)
        return []

    async def run() -> None:
        asked = Chooser(replica.url)
        gateway = Gateway(asked.choose, asked.ask_all, send_all=send_all)
        await exchange(gateway, "/api/pull?endless", {"model": "m"}, leaves=True)

    asyncio.run(run())
    assert ended == ["/api/pull"]


class Sending:
    """All replicas, which answer each command as given."""

    def __init__(self, *answers: Sequence[Posted]) -> None:
        self.answers = list(answers)
        self.commands: list[ReplicaRequest] = []

    async def send_all(self, command: ReplicaRequest) -> Sequence[Posted]:
        self.commands.append(command)
        return self.answers.pop(0)

    def ask(self, path: str, fields: Any, url: str = "", **scope: Any) -> tuple[int, Any]:
        """The status and the JSON body of what the client gets. Without url, no replica is asked
        alone."""

        async def run() -> list[Message]:
            chooser = Chooser(url or "http://127.0.0.1:1")
            names = {"", "own"}
            gateway = Gateway(
                chooser.choose, chooser.ask_all, send_all=self.send_all, default_names=names
            )
            return await exchange(gateway, path, fields, **scope)

        sent = asyncio.run(run())
        return sent[0]["status"], json.loads(text_of(sent) or "null")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/models/unload", {}),
        ("/api/generate", {"keep_alive": 0}),
        ("/api/chat", {"keep_alive": "0s", "messages": []}),
    ],
)
def test_a_model_is_unloaded_by_all_replicas(path: str, fields: dict[str, Any]) -> None:
    body = {"model": "m", **fields}
    none, one = answered("a", unloaded=False), answered("b", unloaded=True)
    unloading = Sending([none, one])
    assert unloading.ask(path, body) == (200, {"unloaded": True})
    assert unloading.commands == [
        ReplicaRequest("POST", path, json.dumps(body, separators=(",", ":")).encode())
    ]
    failing = answered("c", 503, error={"message": "it ends", "code": "server_unavailable"})
    status, error = Sending([none, one, failing]).ask(path, body)
    assert (status, "replica r-c on c: it ends" in str(error)) == (503, True)
    missing = answered("a", 404, error="no such model")
    assert Sending([missing]).ask(path, body) == (404, {"error": "no such model"})


def test_what_is_on_disk_is_changed_once_on_each_machine() -> None:
    places = [Place(f"r{number}", "same name", "ab"[number % 2]) for number in range(6)]
    copying, deleting = Sending([answered("a")]), Sending([answered("a")], [answered("a")])
    copying.ask("/api/copy", {"source": "m", "destination": "n"})
    deleting.ask("/api/delete", {"model": "m"}, method="DELETE")
    (copy,), (unload, remove) = copying.commands, deleting.commands
    assert [len(each.receivers(places)) for each in (copy, unload, remove)] == [2, 6, 2]
    assert {each.node for each in copy.receivers(places)} == {"a", "b"}
    assert json.loads(unload.body) == {"model": "m", "keep_files": True}
    assert json.loads(remove.body) == {"model": "m"}


def test_a_copy_succeeds_when_all_machines_have_the_name() -> None:
    body = {"source": "m", "destination": "n"}
    assert Sending([answered("a"), answered("b")]).ask("/api/copy", body)[0] == 200
    failing = answered("b", 400, error="n is the name of another model")
    said = {"error": "replica r-b on b: n is the name of another model"}
    assert Sending([answered("a"), failing]).ask("/api/copy", body) == (400, said)


def test_a_model_in_use_is_deleted_nowhere() -> None:
    busy = answered("b", 409, error="m is in use")
    deleting = Sending([answered("a"), busy])
    said = {"error": "replica r-b on b: m is in use"}
    assert deleting.ask("/api/delete", {"model": "m"}, method="DELETE") == (409, said)
    assert len(deleting.commands) == 1
    alone = Sending([busy])
    assert alone.ask("/api/delete", {"model": "m"}, method="DELETE") == (
        409,
        {"error": "m is in use"},
    )


def test_a_machine_without_the_model_has_nothing_to_delete() -> None:
    there, missing = answered("a"), answered("b", 404, error="no such model")
    body = {"model": "m"}
    deleted = Sending([there, missing], [there, missing]).ask("/api/delete", body, method="DELETE")
    assert deleted[0] == 200
    nowhere = Sending([missing, missing]).ask("/api/delete", body, method="DELETE")
    assert nowhere == (404, {"error": "no such model"})
    busy = answered("b", 409, error="m is in use")
    for posted in ([missing, busy], [busy, missing]):  # sent again after a part has failed
        assert Sending(posted).ask("/api/delete", body, method="DELETE")[0] == 409


def test_a_replica_that_gives_no_answer_is_named_even_if_it_is_the_only_one() -> None:
    silent = Posted.without_answer(Place("r-a", "a", "a"), "it has ended")
    said = {"error": "replica r-a on a: it has ended: try again"}
    assert Sending([silent]).ask("/api/copy", {"source": "m", "destination": "n"}) == (503, said)


@pytest.mark.parametrize("path", ["/v1/models/load", "/api/generate", "/api/chat"])
def test_a_model_is_loaded_by_all_replicas(replica: ScriptedServer, path: str) -> None:
    for model, answering_only in (("own", False), ("other", True)):
        loading = Sending([answered("a"), answered("b")])
        assert loading.ask(path, {"model": model}, replica.url)[0] == 200
        (command,) = loading.commands
        assert json.loads(command.body) == {"model": model, "stream": False}
        assert command.answering_only == answering_only, "prompt replicas have the own model only"
    full = answered("b", 507, error={"message": "no memory", "code": "out_of_memory"})
    status, error = Sending([answered("a"), full]).ask(path, {"model": "m"}, replica.url)
    assert (status, "replica r-b on b: no memory" in str(error)) == (507, True)


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_a_load_that_is_streamed_ends_when_all_have_the_model(pieces: int) -> None:
    said = b'data: {"progress":1.0}\n\ndata: {"model":"m"}\n\ndata: [DONE]\n\n'
    parts = [said[i : i + len(said) // pieces] for i in range(0, len(said), len(said) // pieces)]

    def transport(request: httpx.Request) -> httpx.Response:
        headers = {"Content-Type": "text/event-stream; charset=utf-8"}
        return httpx.Response(200, headers=headers, stream=_Pieces(parts))

    async def run(*posted: Posted) -> str:
        async def send_all(command: ReplicaRequest) -> Sequence[Posted]:
            return posted

        chooser = Chooser("http://replica")
        gateway = Gateway(chooser.choose, chooser.ask_all, send_all=send_all)
        gateway._client = httpx.AsyncClient(transport=httpx.MockTransport(transport))
        return text_of(await exchange(gateway, "/v1/models/load", {"model": "m", "stream": True}))

    assert asyncio.run(run(answered("a"))) == said.decode()
    full = answered("b", 507, error={"message": "no memory", "code": "out_of_memory"})
    progress, error, end = asyncio.run(run(answered("a"), full)).split("\n\n")
    assert (progress, end) == ('data: {"progress":1.0}', "")
    found = json.loads(error.removeprefix("data: "))["error"]
    assert (found["message"], found["code"]) == ("replica r-b on b: no memory", "out_of_memory")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"keep_alive": 0}),
        (OLLAMA, {"keep_alive": 0, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/generate", {"keep_alive": 0, "suffix": "b"}),
        ("/v1/models/load", []),
        ("/api/show", {"model": "m"}),
        ("/v1/models/load", {"model": "\ud83d"}),
    ],
)
def test_what_manages_no_model_goes_to_one_replica(
    replica: ScriptedServer, path: str, fields: Any
) -> None:
    Sending().ask(path, fields, replica.url)
    assert len(replica.seen) == 1


def test_a_time_beyond_all_numbers_is_refused_by_the_replicas(replica: ScriptedServer) -> None:
    refused = answered("a", 400, error="keep_alive is too long")
    sending = Sending([refused])
    sending.ask("/api/generate", {"model": "m", "keep_alive": 10**400}, replica.url)
    assert [each.path for each in sending.commands] == ["/api/generate"]


def test_a_body_that_is_not_json_by_its_type_loads_nothing(replica: ScriptedServer) -> None:
    """The replica that is chosen refuses it."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    Sending().ask("/v1/models/load", {"model": "m"}, replica.url, headers=form)
    assert len(replica.seen) == 1


def test_loaded_models_of_all_replicas_are_listed_once() -> None:
    bodies = {"a": ["tiny", "x"], "b": ["tiny", "y"]}
    answers = [
        (name, json.dumps({"models": [{"name": each, "of": name} for each in names]}).encode())
        for name, names in bodies.items()
    ]
    found = {each["name"]: each["of"] for each in merged_ps(answers)["models"]}
    assert found == {"tiny": "a", "x": "a", "y": "b"}
