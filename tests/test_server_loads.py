"""/v1/loads: what smg reads to choose a worker, and the order of models by which it names one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_server import real_server
from serving import MANY_WORDS, ServerHarness, in_thread, server_harness, wait_until
from test_cluster_gateway import Chooser, exchange, text_of

import localgen
from localgen.backends.engine_stats import EngineStats, SequenceStats
from localgen.cluster.gateway import Gateway
from localgen.cluster.totals import merged_loads
from localgen.hub.resolve import resolve_model
from localgen.server.stats.loads import ServerLoad, loads_body, read_sections

ALL = read_sections(None)
counts = st.integers(0, 10_000)
server_loads = st.builds(
    ServerLoad,
    num_running_reqs=counts,
    num_waiting_reqs=counts,
    num_waiting_uncached_tokens=counts,
    num_used_tokens=counts,
    max_total_num_tokens=st.integers(1, 10_000),
    max_running_requests=counts,
    gen_throughput=st.integers(0, 1000).map(float),
)


@pytest.fixture
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


def load_of(server: ServerHarness, query: str = "") -> dict[str, Any]:
    reply = server.http.get(f"/v1/loads{query}")
    assert reply.status_code == 200, reply.text
    (load,) = reply.json()["loads"]
    assert load.pop("dp_rank") == 0
    return dict(load)


def queued(prompt_tokens: int, state: str = "queued") -> SequenceStats:
    return SequenceStats(
        request_id="",
        client="",
        state=state,
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        computed_tokens=0,
        generated_tokens=0,
        ctx=100,
        age_s=0.0,
    )


def test_a_server_without_models_says_only_that_nothing_runs(served: ServerHarness) -> None:
    assert load_of(served) == {
        "num_running_reqs": 0,
        "num_waiting_reqs": 0,
        "num_total_reqs": 0,
        "num_waiting_uncached_tokens": 0,
        "queues": {"waiting": 0},
    }
    body = served.http.get("/v1/loads").json()
    assert (body["version"], body["dp_rank_count"]) == (localgen.__version__, 1)
    assert datetime.fromisoformat(body["timestamp"]).tzinfo is not None


def test_running_requests_are_counted(served: ServerHarness) -> None:
    model = served.model("slow", token_s=0.02)
    chats = [in_thread(lambda: served.chat(model, MANY_WORDS)) for _ in range(2)]
    wait_until(lambda: load_of(served)["num_running_reqs"] == 2)
    assert load_of(served)["num_total_reqs"] == 2
    served.http.post("/v1/models/unload", json={"model": model})
    for chat in chats:
        chat.join(10)
    wait_until(lambda: load_of(served)["num_running_reqs"] == 0)


def test_requests_wait_while_their_model_loads(served: ServerHarness) -> None:
    model = served.model("late", load_s=1.0)
    chats = [in_thread(lambda: served.chat(model)) for _ in range(3)]
    wait_until(lambda: load_of(served)["queues"] == {"waiting": 3})
    assert load_of(served)["num_waiting_reqs"] == 3
    for chat in chats:
        chat.join(10)
    wait_until(lambda: load_of(served)["num_waiting_reqs"] == 0)


def test_figures_of_an_engine() -> None:
    stats = EngineStats(
        running=1,
        waiting=2,
        kv_tokens=1000,
        kv_used=250,
        kv_cached=500,
        decode_tokens_per_s=8.5,
        sequences=(queued(40, "decode"), queued(300), queued(7)),
    )
    (load,) = loads_body(ServerLoad.of_engine(stats, 16), ALL)["loads"]
    assert load == {
        "dp_rank": 0,
        "num_running_reqs": 1,
        "num_waiting_reqs": 2,
        "num_total_reqs": 3,
        "num_waiting_uncached_tokens": 307,
        "num_used_tokens": 250,
        "max_total_num_tokens": 1000,
        "token_usage": 0.25,
        "max_running_requests": 16,
        "gen_throughput": 8.5,
        "memory": {"token_capacity": 1000},
        "queues": {"waiting": 2},
    }


@pytest.mark.parametrize(
    ("query", "sections"),
    [
        ("?include=core,disagg,queues,memory", {"core", "queues"}),  # as smg 1.13 asks
        ("?include=queues", {"queues"}),
        ("?include=core, queues", {"core", "queues"}),
        ("?include=spec,lora,disagg,memory", set()),
        ("?include=all", {"core", "queues"}),
        ("?include=", {"core", "queues"}),
    ],
)
def test_sections(served: ServerHarness, query: str, sections: set[str]) -> None:
    load = load_of(served, query)
    assert ("num_running_reqs" in load) == ("core" in sections)
    assert ("queues" in load) == ("queues" in sections)


def test_an_unknown_section_is_named(served: ServerHarness) -> None:
    reply = served.http.get("/v1/loads?include=core,cores")
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "include")
    said = "include: unknown section 'cores': core, memory, spec, lora, disagg, queues, all"
    assert error["message"] == said


@given(st.lists(server_loads, min_size=1))
def test_the_load_of_a_cluster_is_the_sum_of_its_replicas(parts: list[ServerLoad]) -> None:
    bodies = [("r", json.dumps(loads_body(part, ALL)).encode()) for part in parts]
    total = merged_loads(bodies)
    assert total.num_running_reqs == sum(part.num_running_reqs for part in parts)
    assert total.gen_throughput == sum(part.gen_throughput for part in parts)
    (load,) = loads_body(total, ALL)["loads"]
    used = sum(part.num_used_tokens for part in parts)
    assert load["token_usage"] == used / sum(part.max_total_num_tokens for part in parts)


def asked_gateway(query: str) -> tuple[int, dict[str, Any]]:
    part = ServerLoad(num_running_reqs=2, num_used_tokens=10, max_total_num_tokens=100)
    body = json.dumps(loads_body(part, ALL)).encode()

    async def ask_all(path: str) -> list[tuple[str, bytes]]:
        assert path == "/v1/loads"
        return [("a", body), ("b", body)]

    gateway = Gateway(Chooser("http://127.0.0.1:1").choose, ask_all)
    sent = asyncio.run(exchange(gateway, f"/v1/loads{query}"))
    return sent[0]["status"], json.loads(text_of(sent))


def test_the_gateway_answers_for_its_replicas() -> None:
    status, body = asked_gateway("?include=core,memory")
    (load,) = body["loads"]
    assert (status, load["num_running_reqs"], load["token_usage"]) == (200, 4, 0.1)
    assert load["memory"] == {"token_capacity": 200}
    assert "queues" not in load
    assert "memory" not in asked_gateway("?include=core")[1]["loads"][0]
    status, body = asked_gateway("?include=cores")
    assert (status, body["error"]["param"]) == (400, "include")


def test_the_model_of_serve_is_listed_first(tmp_path: Path) -> None:
    served = tmp_path / "zebra.gguf"
    served.write_bytes(resolve_model("tiny").path.read_bytes())
    with real_server(str(served)) as server:
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        load = httpx.get(f"{server.url}/v1/loads").json()["loads"][0]
    names = [card["id"] for card in cards]
    assert names[0] == "zebra", "tiny would be first"
    assert "tiny" in names
    assert load["max_total_num_tokens"] == load["memory"]["token_capacity"] > 0
    assert 0 < load["max_running_requests"] < 1000
