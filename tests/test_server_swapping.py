"""Two models with memory for one: requests wait for their turn."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import ENGINE
from serving import (
    MANY_WORDS,
    ServerHarness,
    chat_body,
    in_thread,
    running_alone,
    server_harness,
    settings_in,
    wait_until,
)

from localgen.backends.errors import ModelBusy, OutOfMemory
from localgen.backends.model_info import LoadOptions
from localgen.placement.footprint import estimate_footprint
from localgen.server.models.manager import ModelManager

# minimum memory of a model, however small its file
LEAST = estimate_footprint(0, None).need_bytes()
ROOM_FOR_ONE = LEAST * 3 // 2
KV = {"kv_bytes": LEAST}


@pytest.fixture
def served() -> Iterator[ServerHarness]:
    with server_harness(memory_limit=ROOM_FOR_ONE) as built:
        yield built


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerHarness]:
    with server_harness(memory_limit=ROOM_FOR_ONE) as built:
        yield built


@pytest.fixture
def running(shared: ServerHarness) -> Iterator[ServerHarness]:
    """A server that other tests have used, without models."""
    yield from running_alone(shared)


def waiting(served: ServerHarness) -> dict[str, int]:
    counts: dict[str, int] = served.http.get("/v1/stats").json()["server"]["waiting_for_memory"]
    return counts


def ask(served: ServerHarness, model: str, replies: list[httpx.Response]) -> None:
    replies.append(served.chat(model, "x"))


def hold(served: ServerHarness, model: str) -> Any:
    """A stream of a model that runs until it is closed, and its first event."""
    events = served.events(model, MANY_WORDS)
    next(events)
    return events


def test_16_clients_alternate_between_two_models(running: ServerHarness) -> None:
    models = [running.model(name, **KV) for name in "ab"]
    statuses: Counter[int] = Counter()
    left = iter(range(500))

    async def client(number: int, http: httpx.AsyncClient) -> None:
        for step, _ in enumerate(left):
            body = chat_body(models[(number + step) % 2], "some words")
            reply = await http.post("/v1/chat/completions", json=body)
            statuses[reply.status_code] += 1

    async def run() -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(running.settings.socket_path))
        async with httpx.AsyncClient(
            base_url="http://test", transport=transport, timeout=120, trust_env=False
        ) as http:
            await asyncio.gather(*(client(number, http) for number in range(16)))

    asyncio.run(run())
    assert statuses == {200: 500}
    # about 32 if each load serves every client
    assert sum(map(running.loads, models)) <= 64
    assert waiting(running) == {}


def test_a_long_stream_ends_before_the_swap_and_new_requests_wait_behind_it(
    running: ServerHarness,
) -> None:
    a, b = running.model("a", token_s=0.05, **KV), running.model("b", **KV)
    stream = hold(running, a)
    replies: dict[str, list[httpx.Response]] = {a: [], b: []}
    threads = [in_thread(partial(ask, running, b, replies[b]))]
    wait_until(lambda: waiting(running) == {"b": 1})

    def ask_until_it_waits() -> None:
        while running.loads(a) == 1:
            ask(running, a, replies[a])

    threads.append(in_thread(ask_until_it_waits))
    wait_until(lambda: waiting(running) == {"a": 1, "b": 1}, timeout_s=40)
    metrics = running.http.get("/metrics").text
    assert 'localgen:num_requests_waiting_for_memory{model_name="b"} 1.0' in metrics
    assert running.loaded() == ["a"]
    stream.close()
    for thread in threads:
        thread.join(timeout=20)
    assert {reply.status_code for got in replies.values() for reply in got} == {200}
    assert (running.loads(a), running.loads(b)) == (2, 1), "b had its turn before a again"


def test_a_client_that_leaves_ends_its_wait(running: ServerHarness) -> None:
    a, b = running.model("a", token_s=0.02, **KV), running.model("b", **KV)
    name = running.named("by-name", **KV)
    stream = hold(running, a)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat_body(b, "x"),
        "/v1/embeddings": {"model": b, "input": "x"},
        "/v1/models/load": {"model": b},
        "/api/generate": {"model": name},
    }
    for path, body in bodies.items():
        transport = httpx.HTTPTransport(uds=str(running.settings.socket_path))
        leaving = httpx.Client(base_url="http://test", transport=transport, trust_env=False)
        with leaving, pytest.raises(httpx.ReadTimeout):
            leaving.post(path, json=body, timeout=0.5)
        wait_until(lambda: waiting(running) == {})
    stream.close()
    assert running.chat(a, "x").status_code == 200
    assert running.loads(b) == running.loads(str(running.folder / "by-name.gguf")) == 0


def test_a_local_client_says_what_it_waits_for(running: ServerHarness) -> None:
    a, b = running.model("a", token_s=0.02, **KV), running.model("b", **KV)
    stream = hold(running, a)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        stream.close()

    assert running.client(say).load(b, LoadOptions()).name == "b"
    (line,) = said
    assert line.startswith("waiting: b needs about")
    assert line.endswith("; in use: a")


def test_a_full_queue_is_refused_with_retry_after() -> None:
    with server_harness(memory_limit=ROOM_FOR_ONE, max_queue=1) as served:
        served.start()
        a, b = served.model("a", token_s=0.02, **KV), served.model("b", **KV)
        stream = hold(served, a)
        replies: list[httpx.Response] = []
        thread = in_thread(partial(ask, served, b, replies))
        wait_until(lambda: waiting(served) == {"b": 1})
        full = served.chat(b, "x")
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert int(full.headers["Retry-After"]) >= 1
        stream.close()
        thread.join(timeout=20)
        assert replies[0].status_code == 200


def test_a_request_waits_no_longer_than_its_time_limit(served: ServerHarness) -> None:
    served.start(timeout_s=0.5)
    a, b = served.model("a", load_s=60, **KV), served.model("b", **KV)
    body = {"model": a}
    loading = in_thread(partial(served.http.post, "/v1/models/load", json=body))
    wait_until(lambda: served.loaded() == ["a"])
    reply = served.chat(b, "x")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "memory_in_use")
    assert "in use: a; try again later" in reply.json()["error"]["message"]
    assert int(reply.headers["Retry-After"]) >= 1
    assert waiting(served) == {}
    served.http.post("/v1/models/unload", json=body)
    loading.join(timeout=20)


def test_a_server_that_shuts_down_ends_the_waits(served: ServerHarness) -> None:
    process = served.start()
    a, b = served.model("a", token_s=0.02, **KV), served.model("b", **KV)
    stream = hold(served, a)
    replies: list[httpx.Response] = []
    threads = [in_thread(partial(ask, served, b, replies)) for _ in range(3)]
    wait_until(lambda: waiting(served) == {"b": 3})
    process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(timeout=20)
    assert [reply.json()["error"]["code"] for reply in replies] == ["server_unavailable"] * 3
    assert {reply.status_code for reply in replies} == {503}
    assert not served.loads(b)
    stream.close()
    assert process.wait(timeout=20) == 0


def test_a_waiting_model_that_cannot_be_loaded_fails_its_requests_only(
    running: ServerHarness,
) -> None:
    a, b = running.model("a", token_s=0.02, **KV), running.model("b", fail="b is damaged", **KV)
    stream = hold(running, a)
    replies: list[httpx.Response] = []
    threads = [in_thread(partial(ask, running, b, replies)) for _ in range(3)]
    wait_until(lambda: waiting(running) == {"b": 3})
    stream.close()
    for thread in threads:
        thread.join(timeout=20)
    assert {reply.json()["error"]["message"] for reply in replies} == {"b is damaged"}
    assert running.loads(b) == 1, "they share one load"
    assert running.chat(a, "x").status_code == 200


def test_a_load_that_runs_out_of_memory_waits_for_the_models_in_use() -> None:
    with server_harness() as served:
        served.start()
        a = served.model("a", token_s=0.02)
        b = served.model("b", code="out_of_memory", fail="b does not fit")
        stream = hold(served, a)
        replies: list[httpx.Response] = []
        thread = in_thread(partial(ask, served, b, replies))
        wait_until(lambda: waiting(served) == {"b": 1})
        assert served.loads(b) == 1
        stream.close()
        thread.join(timeout=20)
        assert served.loads(b) == 2, "again without a"
        assert replies[0].status_code == 507
        assert served.loaded() == []


def test_a_model_that_failed_to_load_is_gone_before_anybody_sees_the_error(tmp_path: Path) -> None:
    """A request that found it still there tried again, with the same error, without an end."""
    path = tmp_path / "broken.gguf"
    path.write_text(json.dumps({"code": "out_of_memory", "fail": "it does not fit"}))

    async def watch() -> None:
        manager = ModelManager(settings_in(tmp_path), engine_command=ENGINE)

        async def ask() -> None:
            async with manager.acquire(str(path), allow_paths=True):
                raise AssertionError

        asking = asyncio.create_task(ask())
        while not manager.residents:
            await asyncio.sleep(0)
        (resident,) = manager.residents
        # each pass of the event loop, so that nothing runs between the end of the load and this
        while not resident.load_future.done():
            await asyncio.sleep(0)
        assert manager.residents == ()
        with pytest.raises(OutOfMemory):
            await asking
        await manager.close()

    asyncio.run(asyncio.wait_for(watch(), 60))


def test_a_reload_that_had_to_wait_spares_a_model_that_is_in_use_by_then(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("{}")

    async def watch() -> None:
        manager = ModelManager(settings_in(tmp_path), engine_command=ENGINE)

        async def ask(options: LoadOptions) -> None:
            async with manager.acquire(str(path), options, allow_paths=True):
                pass

        await ask(LoadOptions(ctx=512))
        async with manager._admission:  # as while another model is placed
            larger = asyncio.create_task(ask(LoadOptions(ctx=1024)))
            while manager.active_requests == 0:
                await asyncio.sleep(0.01)
            user = manager.acquire(str(path), allow_paths=True)
            resident, _ = await user.__aenter__()
        with pytest.raises(ModelBusy, match="512"):
            await larger
        assert manager.residents == (resident,)
        await user.__aexit__(None, None, None)
        await ask(LoadOptions(ctx=1024))
        assert manager.residents != (resident,), "without another user it is loaded again"
        await manager.close()

    asyncio.run(asyncio.wait_for(watch(), 60))
