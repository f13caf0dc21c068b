"""llama-server's own routes: /completion, /props, /slots, and paths without /v1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from real_server import RealServer, real_server
from serving import ServerHarness, server_harness, wait_until

import localgen

PROMPT = "Question: What is 17 + 25?\nAnswer:"


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server("tiny", "--ctx", "512") as started:
        yield started


@pytest.fixture(scope="module")
def http(server: RealServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def complete(http: httpx.Client, path: str = "/completion", **fields: Any) -> Any:
    reply = http.post(path, json={"prompt": PROMPT, "temperature": 0, "n_predict": 8, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_completion_has_the_text_of_openai_s(http: httpx.Client) -> None:
    whole = complete(http, return_tokens=True, cache_prompt=True, id_slot=-1)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    theirs = http.post("/v1/completions", json=body).json()
    assert whole["content"] == theirs["choices"][0]["text"] != ""
    assert (whole["stop"], whole["model"], whole["truncated"]) == (True, "tiny", False)
    assert whole["tokens_evaluated"] == theirs["usage"]["prompt_tokens"]
    assert whole["tokens_predicted"] == theirs["usage"]["completion_tokens"]
    assert len(whole["tokens"]) == whole["tokens_predicted"]
    assert {"prompt_n", "predicted_n", "predicted_per_second"} <= set(whole["timings"])
    assert whole["generation_settings"]["n_predict"] == 8
    assert whole["generation_settings"]["n_ctx"] == 512
    # the same prompt as tokens
    tokens = http.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"]
    assert complete(http, prompt=tokens)["content"] == whole["content"]
    assert complete(http, path="/completions")["content"] == whole["content"]


def test_a_stream_is_the_whole_completion(http: httpx.Client) -> None:
    whole = complete(http)
    body = {"prompt": PROMPT, "temperature": 0, "n_predict": 8, "stream": True}
    lines = http.post("/completion", json=body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    last = events[-1]
    for name in ("stop_type", "tokens_evaluated", "tokens_predicted", "stopping_word", "model"):
        assert last[name] == whole[name]


def test_why_a_completion_ended(http: httpx.Client) -> None:
    short = complete(http, n_predict=2)
    assert (short["stop_type"], short["tokens_predicted"]) == ("limit", 2)
    whole = complete(http, n_predict=60)
    word = whole["content"][1:3]
    cut = complete(http, n_predict=60, stop=[word])
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
    assert cut["content"] == whole["content"][:1]
    tokens = complete(http, n_predict=1, return_tokens=True)["tokens"]
    banned = complete(http, n_predict=1, return_tokens=True, logit_bias=[[tokens[0], False]])
    assert banned["tokens"] != tokens


def test_probabilities_of_tokens(http: httpx.Client) -> None:
    found = complete(http, n_probs=3, n_predict=4)["completion_probabilities"]
    assert len(found) == 4
    for each in found:
        assert each["bytes"] == list(each["token"].encode())
        assert each["top_logprobs"][0]["id"] == each["id"]  # greedy
        assert len(each["top_logprobs"]) == 3
    assert "completion_probabilities" not in complete(http)


def test_several_prompts(http: httpx.Client) -> None:
    first, second = complete(http, prompt=[PROMPT, "Once"], n_predict=3)
    assert [first["index"], second["index"]] == [0, 1]
    assert first["content"] == complete(http, n_predict=3)["content"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n_predict": -2}, "n_predict"),
        ({"post_sampling_probs": True}, "post_sampling_probs is not supported"),
        ({"response_fields": "content"}, "response_fields"),
        ({"logit_bias": [["text", 1.0]]}, "use token ids"),
        ({"n_probs": 500}, "n_probs must be at most 20"),
        ({"nonsense": 1}, "unknown field nonsense"),
    ],
)
def test_what_is_not_supported_is_refused(
    http: httpx.Client, fields: dict[str, Any], reason: str
) -> None:
    reply = http.post("/completion", json={"prompt": "a", **fields})
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]


def test_props_describe_the_model(http: httpx.Client) -> None:
    complete(http)
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["total_slots"] > 0
    assert props["model_path"] == props["model_alias"] == "tiny"
    assert "messages" in props["chat_template"]
    assert props == http.get("/props", params={"model": "tiny"}).json()
    assert "/" not in props["model_path"]
    reply = http.get("/props", params={"model": "none"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


def test_paths_without_v1(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    answers = [http.post(path + "chat/completions", json=body).json() for path in ("/", "/v1/")]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["system_fingerprint"] == f"localgen-{localgen.__version__}"
    assert http.get("/models").json()["data"][0]["id"] == "tiny"
    assert http.get("/version").json() == {"version": localgen.__version__}


def test_embeddings_without_v1_have_llama_server_s_form(http: httpx.Client) -> None:
    theirs = http.post("/v1/embeddings", json={"input": ["a", "b"]}).json()["data"]
    for path, field in (("/embeddings", "input"), ("/embedding", "content")):
        found = http.post(path, json={field: ["a", "b"]}).json()
        assert [each["index"] for each in found] == [0, 1]
        for each, other in zip(found, theirs, strict=True):
            assert each["embedding"][0] == pytest.approx(other["embedding"], abs=1e-4)


@pytest.fixture
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


def test_slots_show_running_requests_without_their_prompts(served: ServerHarness) -> None:
    model = served.model("slow", token_s=0.05)
    assert served.http.get("/slots").status_code == 404
    events = served.events(model, "secret " * 100)
    next(events)

    def slots() -> list[dict[str, Any]]:
        reply = served.http.get("/slots", params={"model": "slow"})
        return list(reply.json()) if reply.status_code == 200 else []

    wait_until(lambda: any(slot["is_processing"] for slot in slots()))
    found = slots()
    assert [slot["id"] for slot in found] == list(range(4))
    assert [slot["is_processing"] for slot in found] == [True, False, False, False]
    assert found[0]["n_ctx"] == 2048
    assert "secret" not in served.http.get("/slots").text
    events.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"echo": True}, "echo is not supported"),
        ({"max_tokens": 5}, ": give one"),
        ({"max_tokens": 5, "n_predict": -1}, ": give one"),
    ],
)
def test_fields_without_effect_are_refused(
    http: httpx.Client, fields: dict[str, Any], reason: str
) -> None:
    body = {"prompt": PROMPT, "n_predict": 8} | fields
    reply = http.post("/completion", json=body)
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]
    same = http.post("/completion", json=body | {"n_predict": 5, "max_tokens": 5, "echo": False})
    assert same.json()["tokens_predicted"] <= 5
