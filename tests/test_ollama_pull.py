"""Ollama's client pulls through the real server from a hub on loopback."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from pathlib import Path

import ollama
import pytest
from loopback_hub import LoopbackHub
from ollama import ResponseError
from pull_fixtures import CONTENT, Q4, REPO, environment, hub, random_bytes
from real_server import RealServer, real_server
from serving import settings_in, wait_until

from localgen.hub import pull
from localgen.hub.hf_client import Notify, forward_warnings
from localgen.server.models.manager import ModelManager
from localgen.server.ollama import routes
from localgen.server.ollama.pull import PullEvent, _progress_events, stream_pull
from localgen.server.stats.request_log import RequestLog

__all__ = ["hub"]
NAME = f"{REPO}:Q4_K_M"
OTHER = "acme/Other-GGUF"


@pytest.fixture
def server(hub: LoopbackHub, tmp_path: Path) -> Iterator[RealServer]:
    ours = environment(hub, tmp_path / "hub", tmp_path)
    wanted = ("HF_ENDPOINT", "HF_HUB_CACHE", "HF_HOME", "NO_PROXY")
    with real_server(**{name: ours[name] for name in wanted}) as started:
        yield started


@pytest.fixture
def client(server: RealServer) -> ollama.Client:
    return ollama.Client(server.url)


def here(client: ollama.Client) -> list[str | None]:
    return [model.model for model in client.list().models]


def test_a_streamed_pull(client: ollama.Client, hub: LoopbackHub) -> None:
    lines = list(client.pull(f"hf.co/{REPO}", stream=True))
    assert lines[0].status == "pulling manifest"
    assert lines[-1].status == "success"
    moved = [line for line in lines if line.digest]
    assert moved
    assert len({line.digest for line in moved}) == 1
    digest = str(moved[0].digest)
    assert digest.startswith("sha256:")
    assert {line.status for line in moved} == {f"pulling {digest[7:19]}"}
    assert {line.total for line in moved} == {len(CONTENT)}
    counts = [line.completed or 0 for line in moved]
    assert counts == sorted(counts)
    assert counts[-1] == len(CONTENT)
    assert NAME in here(client)


def test_a_pull_without_a_stream_and_one_that_is_here(
    client: ollama.Client, hub: LoopbackHub
) -> None:
    assert client.pull(REPO).status == "success"
    assert client.pull(REPO).status == "success"
    *_, moved, last = client.pull(REPO, stream=True)
    assert (moved.completed, last.status) == (len(CONTENT), "success")
    assert len(hub.downloads) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "mine"])
def test_a_pull_of_what_is_not_on_the_hub_but_here(
    client: ollama.Client, hub: LoopbackHub, name: str, stream: bool
) -> None:
    client.copy("tiny", "mine")
    answer = client.pull(name, stream=True) if stream else [client.pull(name)]
    assert [line.status for line in answer] == ["success"]
    assert not hub.downloads


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("acme/Nothing", 404, "acme/Nothing"),
        (f"{REPO}:Q9", 404, "Q4_K_M"),
        ("acme/Gated", 403, "gated"),
    ],
)
def test_failed_pulls_are_errors(
    client: ollama.Client, hub: LoopbackHub, name: str, status: int, says: str, stream: bool
) -> None:
    hub.add("acme/Gated", {Q4: CONTENT}, gated=set())
    with pytest.raises(ResponseError, match=says) as refused:
        list(client.pull(name, stream=True) if stream else client.pull(name))
    late = stream and says == "gated"
    assert refused.value.status_code == (-1 if late else status)


def test_a_damaged_download_ends_the_stream_in_an_error(
    client: ollama.Client, hub: LoopbackHub
) -> None:
    hub.faults.corrupt = 1
    with pytest.raises(ResponseError, match="arrived damaged"):
        list(client.pull(REPO, stream=True))
    assert client.pull(REPO).status == "success"


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_stream_stops_the_pull_and_the_next_resumes(
    client: ollama.Client, hub: LoopbackHub, tmp_path: Path, stream: bool
) -> None:
    content = random_bytes(30_000_000, seed=2)
    hub.add(OTHER, {Q4: content})
    hub.faults.hold = threading.Event()
    impatient = ollama.Client(str(client._client.base_url), timeout=None if stream else 2.0)
    if stream:
        with closing(impatient.pull(OTHER, stream=True)) as lines:  # type: ignore[type-var]
            assert next(lines).status == "pulling manifest"
            assert hub.faults.hold.wait(20)
    else:
        with pytest.raises(Exception, match="timed out"):
            impatient.pull(OTHER)
    time.sleep(0.5)  # for the server to see that the connection is closed
    hub.faults.hold = None
    hub.faults.release.set()
    folder = tmp_path / "hub" / "models--acme--Other-GGUF" / "blobs"

    def size() -> int:
        return sum(path.stat().st_size for path in folder.iterdir())

    settled = [size()]

    def still() -> bool:
        time.sleep(0.3)
        settled.append(size())
        return settled[-1] == settled[-2]

    wait_until(still)
    assert 0 < settled[-1] < len(content)
    assert f"{OTHER}:Q4_K_M" not in here(client)
    assert client.pull(OTHER).status == "success"
    assert hub.downloads[-1].start > 0
    assert f"{OTHER}:Q4_K_M" in here(client)


def test_delete_takes_it_from_the_disk(client: ollama.Client, tmp_path: Path) -> None:
    client.pull(REPO)
    assert client.delete(NAME).status == "success"
    assert NAME not in here(client)
    assert not list((tmp_path / "hub").glob("models--*/blobs/*"))
    with pytest.raises(ResponseError) as refused:
        client.delete(NAME)
    assert refused.value.status_code == 404


def test_progress_is_told_by_file(hub: LoopbackHub) -> None:
    files = {
        f"m-Q8_0-0000{i}-of-00003.gguf": random_bytes(size, i)
        for i, size in ((1, 90), (2, 50), (3, 70))
    }
    hub.add("acme/Shards-GGUF", files)
    plan = pull.plan_pull("acme/Shards-GGUF:Q8_0")

    def told(before: int, here: int) -> list[object]:
        return [(line["total"], line["completed"]) for line in _progress_events(plan, before, here)]

    assert told(-1, 0) == [(90, 0)]
    assert told(0, 0) == []
    assert told(30, 90) == [(90, 90), (50, 0)]
    assert told(90, 160) == [(50, 50), (70, 20)]
    assert told(-1, 210) == [(90, 90), (50, 50), (70, 70)]


@pytest.mark.parametrize("is_cached", [False, True])
def test_what_a_short_pull_says_is_told(monkeypatch: pytest.MonkeyPatch, is_cached: bool) -> None:
    class Plan:
        quant_reason, files, size_bytes = "", (), 0

    def plan_pull(name: str, notify: Notify, **options: object) -> Plan:
        notify("waiting for the hub")
        return Plan()

    def run_pull(plan: Plan, on_bytes: object, notify: Notify) -> None:
        notify("the connection was lost, resuming the download")

    Plan.is_cached = is_cached  # type: ignore[attr-defined]
    monkeypatch.setattr(pull, "plan_pull", plan_pull)
    monkeypatch.setattr(pull, "run_pull", run_pull)

    async def read() -> list[object]:
        return [event["status"] async for event in stream_pull("acme/M-GGUF")]

    lost = [] if is_cached else ["the connection was lost, resuming the download"]
    assert asyncio.run(read()) == ["pulling manifest", "waiting for the hub", *lost, "success"]


def test_threads_hear_what_their_own_calls_say() -> None:
    logger = logging.getLogger("huggingface_hub")
    before = logger.handlers, logger.propagate
    heard: dict[str, list[str]] = {"a": [], "b": []}
    meet = threading.Barrier(2)

    def talk(name: str) -> None:
        with forward_warnings(heard[name].append):
            meet.wait(10)
            logger.warning("Retrying %s", name)
            meet.wait(10)
            if name == "a":
                meet.wait(10)
        if name == "b":
            meet.wait(10)
            logger_is_quiet.append(logger.handlers != before[0])

    logger_is_quiet: list[bool] = []
    threads = [threading.Thread(target=talk, args=(name,)) for name in heard]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [len(lines) for lines in heard.values()] == [1, 1]
    assert heard["a"][0].endswith("retrying a")
    assert (logger.handlers, logger.propagate) == before


def test_a_pull_keeps_the_server_from_exiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = ModelManager(settings_in(tmp_path))

    async def pull(name: str) -> AsyncGenerator[PullEvent, None]:
        yield {"status": f"{name}: idle for {manager.idle_s} s"}

    monkeypatch.setattr(routes, "stream_pull", pull)
    api = routes.OllamaApi(manager, RequestLog(()), None)

    async def collect() -> list[PullEvent]:
        return [event async for event in api._stream_pull("big")]

    assert asyncio.run(collect()) == [{"status": "big: idle for 0.0 s"}]
    assert manager.idle_s > 0
