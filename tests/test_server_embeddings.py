"""/v1/embeddings over fake engines: accepted input, rejected input, and endings."""

from __future__ import annotations

import base64
import json
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import vector_of
from serving import ServerHarness, in_thread, running_alone, server_harness, wait_until

from localgen.machine.python_process import python_environment


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerHarness]:
    """One server for all tests that leave it unchanged."""
    with server_harness() as built:
        built.start()
        yield built


@pytest.fixture
def served(shared: ServerHarness) -> Iterator[ServerHarness]:
    """The same without models."""
    yield from running_alone(shared)


def ask(served: ServerHarness, model: str, **body: Any) -> httpx.Response:
    return served.http.post("/v1/embeddings", json={"model": model, **body})


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("hello", ["hello"]),
        (["hello"], ["hello"]),
        (["a", "bc", "def"], ["a", "bc", "def"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2, 3], [4]], [(1, 2, 3), (4,)]),
        (["ab", [1]], ["ab", (1,)]),
    ],
)
def test_every_kind_of_input(shared: ServerHarness, given: Any, texts: list[Any]) -> None:
    reply = ask(shared, shared.model(), input=given)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["object"] == "list"
    assert body["model"] == "echo"
    assert [entry["index"] for entry in body["data"]] == list(range(len(texts)))
    for entry, text in zip(body["data"], texts, strict=True):
        assert entry["object"] == "embedding"
        assert entry["embedding"] == pytest.approx(vector_of(text))
    tokens = sum(map(len, texts))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert body["timings"]["prompt_n"] == tokens
    assert len(reply.headers["x-request-id"]) == 24


def test_ollama_durations_include_the_load(served: ServerHarness) -> None:
    body = {"model": served.named("slow", load_s=0.5), "input": "hello"}
    first, second = (served.http.post("/api/embed", json=body).json() for _ in range(2))
    assert first["total_duration"] >= first["load_duration"] > 0.4e9
    assert second["total_duration"] >= second["load_duration"] > 0
    assert second["load_duration"] < first["load_duration"]


def test_base64_is_little_endian_float32(shared: ServerHarness) -> None:
    body = ask(shared, shared.model(), input=["hello", "hi"], encoding_format="base64").json()
    for entry, text in zip(body["data"], ["hello", "hi"], strict=True):
        numbers = struct.unpack("<4f", base64.b64decode(entry["embedding"]))
        assert numbers == pytest.approx(vector_of(text))


def test_fewer_dimensions_have_length_1_again(shared: ServerHarness) -> None:
    model = shared.model()
    body = ask(shared, model, input=["abc", "abcd"], dimensions=2).json()
    first, second = (entry["embedding"] for entry in body["data"])
    assert first == pytest.approx([0.6, -0.8])
    assert second == pytest.approx([0.0, 1.0])
    # only zeros are left of this one, which have no direction
    assert ask(shared, model, input="ab", dimensions=1).json()["data"][0]["embedding"] == [0.0]
    assert len(ask(shared, model, input="a", dimensions=4).json()["data"][0]["embedding"]) == 4


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "input is missing"),
        ({"input": None}, "input", "must be a string, token ids, or a list"),
        ({"input": 5}, "input", "must be a string"),
        ({"input": {}}, "input", "must be a string"),
        ({"input": []}, "input", "must be a string"),
        ({"input": ["a", 5]}, "input[1]", "neither a string nor token ids"),
        ({"input": [1, "a"]}, "input[0]", "neither a string nor token ids"),
        ({"input": [[1], [2.5]]}, "input[1]", "neither"),
        ({"input": [[1], [True]]}, "input[1]", "neither"),
        ({"input": [[1], [-1]]}, "input[1]", "neither"),
        ({"input": [[1], []]}, "input[1]", "neither"),
        ({"input": [2**31]}, "input[0]", "neither"),
        ({"input": [[[1]]]}, "input[0]", "neither"),
        ({"input": ["x"] * 2049}, "input", "2,049 texts, the limit is 2,048"),
        ({"input": "a\ud800"}, "input", "surrogate"),
        ({"input": "a", "dimensions": 0}, "dimensions", "must be at least 1"),
        (
            {"input": "a", "dimensions": 5},
            "dimensions",
            "dimensions is 5, embeddings of echo have 4",
        ),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown field temperature"),
        ({"input": "x" * 1001}, "input", "more than 1000 tokens"),
    ],
)
def test_invalid_requests_are_rejected(
    shared: ServerHarness, body: dict[str, Any], param: str, says: str
) -> None:
    content = json.dumps({"model": shared.model(), **body})
    reply = shared.http.post(
        "/v1/embeddings", content=content, headers={"Content-Type": "application/json"}
    )
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert error["param"] == param
    assert says in error["message"]
    assert "\n" not in error["message"]


def test_2048_texts_are_the_most(served: ServerHarness) -> None:
    body = ask(served, served.model(), input=["x"] * 2048, encoding_format="base64").json()
    assert len(body["data"]) == 2048


def test_disconnect_cancels_the_request(served: ServerHarness) -> None:
    model = served.model(token_s=0.05)

    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            served.http.post(
                "/v1/embeddings", json={"model": model, "input": "a " * 300}, timeout=0.5
            )

    served.chat(model, "hello")
    in_thread(leave).join()
    served.chat(model, "hello")  # fake engines say something only while they work
    wait_until(lambda: served.stats(model)["stats"]["requests_total"]["cancelled"] == 1)
    assert served.stats(model)["active_requests"] == 0


def test_engine_that_dies_is_an_error(served: ServerHarness) -> None:
    model = served.model()
    reply = ask(served, model, input=["a", "!die"])
    assert reply.status_code == 502
    assert reply.json()["error"]["code"] == "engine_died"
    assert ask(served, model, input="a").status_code == 200


def test_an_unknown_model(served: ServerHarness) -> None:
    reply = ask(served, "nobody", input="a")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"


def test_unload_during_a_request_is_an_error(served: ServerHarness) -> None:
    model = served.model(token_s=0.05)
    served.chat(model, "hello")  # it is loaded: what waits for that is told of the load
    found: list[httpx.Response] = []
    asking = in_thread(lambda: found.append(ask(served, model, input="a " * 300)))
    wait_until(lambda: served.stats(model)["active_requests"] == 1)
    time.sleep(0.1)
    served.http.post("/v1/models/unload", json={"model": model})
    asking.join()
    assert found[0].status_code == 502


def test_figures_and_the_log_count_it(served: ServerHarness) -> None:
    model = served.model("counted")
    ask(served, model, input=["hello", "hi"])
    ask(served, model, input="x" * 1001)
    failed = 'request_failure_total{model_name="counted"'
    wait_until(lambda: failed in served.http.get("/metrics").text)
    text = served.http.get("/metrics").text
    for line in (
        'request_success_total{finished_reason="embedded",model_name="counted"} 1.0',
        'request_failure_total{model_name="counted",outcome="context_length_exceeded"} 1.0',
        'prompt_tokens_total{model_name="counted"} 7.0',
        'request_prompt_tokens_count{model_name="counted"} 1.0',
    ):
        assert f"localgen:{line}" in text, line
    # embeddings have no answer: its metrics are not counted
    for name in (
        "request_decode_time_seconds_count",
        "request_generation_tokens_count",
        "prefix_cache_queries_total",
    ):
        assert f'localgen:{name}{{model_name="counted"' not in text
    lines = [
        line for line in served.settings.log_path.read_text().splitlines() if " request id=" in line
    ]
    assert any("outcome=embedded" in line and "new_tokens=7" in line for line in lines)


def test_embed_command_prints_vectors(shared: ServerHarness) -> None:
    texts = [f"text {number}" for number in range(69)] + ["one\u2028line\f"]
    done = embed_command(shared, shared.model(), stdin="\r\n\n".join(texts) + "\n")
    assert done.stderr == ""
    records = [json.loads(line) for line in done.stdout.removesuffix("\n").split("\n")]
    assert [record["text"] for record in records] == texts
    assert records[68]["embedding"] == pytest.approx(vector_of("text 68"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], r"no text for the model \S+: give one as an argument or on standard input"),
        (["x", "--dimensions", "999"], "dimensions is 999, embeddings of echo have"),
    ],
)
def test_embed_command_rejects_invalid_input(
    shared: ServerHarness, arguments: list[str], complaint: str
) -> None:
    done = embed_command(shared, shared.model(), *arguments)
    assert (done.returncode, done.stdout) == (3, "")
    assert re.match(f"localgen: {complaint}", done.stderr)


def embed_command(
    served: ServerHarness, *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localgen.cli.main", "embed", *arguments],
        env=python_environment() | served.settings.to_environment(),
        input=stdin,
        capture_output=True,
        text=True,
    )
