"""Answers in OpenAI's format, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from serving import MANY_WORDS, WORDS, ServerHarness, chat_body, server_harness, wait_until

from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Timings
from localgen.server.openai.schema import ChatRequest, CompletionRequest


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


def notes(answer: dict[str, Any]) -> dict[str, Any]:
    """The fake engine's notes on the request: its sampling parameters."""
    params: dict[str, Any] = json.loads(answer["localgen"]["notes"][1])
    return params


def test_a_whole_chat(served: ServerHarness) -> None:
    answer = served.chat(served.model(), "hello my world", seed=3).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "echo"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello my world"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert set(answer["timings"]) == {field.name for field in fields(Timings)}
    assert answer["localgen"]["ctx"] == 2048
    assert answer["localgen"]["seed"] == 3
    assert answer["localgen"]["stop"] == "</s>"


def test_a_streamed_chat(served: ServerHarness) -> None:
    *events, done = served.events(served.model(token_s=0.01), "hello my world")
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    first, *texts, last = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"]["content"] for event in texts] == [
        "hello",
        " my",
        " world",
    ]
    assert [event["localgen"]["num_tokens"] for event in texts] == [1, 2, 3]
    assert all(event["choices"][0]["finish_reason"] is None for event in (first, *texts))
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["timings"]["predicted_n"] == 3
    assert not any("usage" in event for event in events)


def test_usage_comes_in_a_chunk_of_its_own(served: ServerHarness) -> None:
    options = {"include_usage": True}
    *_, last, _ = served.events(served.model(), "a b", stream_options=options)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2


def test_a_completion_whole_and_streamed(served: ServerHarness) -> None:
    body = {"model": served.model(), "prompt": "a b c", "max_tokens": 2}
    answer = served.http.post("/v1/completions", json=body).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    choice = {"index": 0, "text": "a b", "logprobs": None, "finish_reason": "length"}
    assert answer["choices"] == [choice]
    assert answer["usage"]["completion_tokens"] == 2
    text = served.http.post("/v1/completions", json=body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == "a b"
    assert text.endswith("data: [DONE]\n\n")


def test_logprobs_of_a_chat(served: ServerHarness) -> None:
    answer = served.chat(served.model(), "ä b", logprobs=True, top_logprobs=2).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [position["token"] for position in content] == ["ä", " b"]
    assert content[0]["bytes"] == list("ä".encode())
    assert content[0]["logprob"] == -0.5
    assert len(content[0]["top_logprobs"]) == 2
    plain = served.chat(served.model(), "ä b", logprobs=True).json()
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_logprobs_of_a_completion(served: ServerHarness) -> None:
    body = {"model": served.model(), "prompt": "ab cd", "logprobs": 1}
    answer = served.http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["ab", " cd"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ab": -0.5}, {" cd": -0.5}],
        "text_offset": [0, 2],
    }


def test_every_sampling_parameter_has_a_field() -> None:
    names = {field.name for field in fields(SamplingParams)} - {"infill_sampler"}
    names |= {"samplers"}  # which names it
    assert names <= set(ChatRequest.model_fields)
    assert names <= set(CompletionRequest.model_fields)


def test_samplers_reach_the_engine(served: ServerHarness) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "dry_sequence_breakers": ["x"],
        "logit_bias": {"17": -3},
        "stop": "end",
        "stop_token_ids": [5],
        "max_completion_tokens": 9,
        "ignore_eos": True,
    }
    got = notes(served.chat(served.model(), **asked).json())
    assert got["temperature"] == 0.5
    assert got["top_k"] == 7
    assert got["min_p"] == 0.1
    assert got["repeat_penalty"] == 1.1
    assert got["dry_sequence_breakers"] == ["x"]
    assert got["logit_bias"] == {"17": -3.0}
    assert got["stop"] == ["end"]
    assert got["stop_token_ids"] == [5]
    assert got["max_tokens"] == 9
    assert got["ignore_eos"] is True
    assert got["top_p"] is None


def test_temperature_zero_is_not_the_default(served: ServerHarness) -> None:
    assert notes(served.chat(served.model(), temperature=0).json())["temperature"] == 0.0


def test_clients_are_told_apart(served: ServerHarness) -> None:
    model = served.model()

    def client_of(headers: dict[str, str], **extra: Any) -> str:
        body = chat_body(model, "a", **extra)
        reply = served.http.post("/v1/chat/completions", json=body, headers=headers)
        return str(reply.json()["localgen"]["notes"][0])

    assert client_of({}, user="eve") == "client eve"
    assert client_of({"X-Localgen-Session": "s1"}) == "client s1"
    with ServerHarness(served.folder).http as another:
        reply = another.post("/v1/chat/completions", json=chat_body(model, "a"))
        assert reply.json()["localgen"]["notes"][0] != client_of({})


def test_content_in_parts_and_the_developer(served: ServerHarness) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "c"}, {"role": "user", "content": parts}]
    body = {"model": served.model(), "messages": messages}
    answer = served.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "a b"


def test_fields_without_effect_are_accepted(served: ServerHarness) -> None:
    harmless: dict[str, Any] = {
        "n": 1,
        "tools": None,
        "response_format": {"type": "text"},
        "logit_bias": None,
    }
    assert served.chat(served.model(), "a", **harmless).status_code == 200


def test_text_with_odd_line_breaks_survives(served: ServerHarness) -> None:
    text = "a\u2028b\u0085c\n\nd"
    body = {"model": served.model(), "prompt": text, "stream": True}
    reply = served.http.post("/v1/completions", json=body)
    first = json.loads(reply.content.split(b"\n\n")[0].removeprefix(b"data: "))
    assert first["choices"][0]["text"] == text


def test_models_and_their_statistics(served: ServerHarness) -> None:
    model = served.model("listed")
    served.chat(model, "a")
    cards = {card["id"]: card for card in served.http.get("/v1/models").json()["data"]}
    assert cards["listed"]["state"] == "loaded"
    assert cards["listed"]["source"] == "file"
    stats = served.stats(model)
    assert stats["processor"] == "100% CPU"
    assert stats["rss_bytes"] > 1_000_000
    assert stats["info"]["architecture"] == "fake"
    assert stats["stats"]["running"] == 0
    assert 290 < stats["until_s"] <= 300


def test_stats_stream(served: ServerHarness) -> None:
    with served.http.stream("GET", "/v1/stats?stream=true") as reply:
        lines = [line for line, _ in zip(reply.iter_lines(), range(3), strict=False) if line]
    assert json.loads(lines[0].removeprefix("data: "))["server"]["status"] == "ok"
    assert len(lines) == 2


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_the_request(served: ServerHarness, stream: bool) -> None:
    model = served.model(f"slow-{stream}", token_s=0.02)
    served.chat(model, "a")  # loaded
    body = chat_body(model, MANY_WORDS, stream=stream)
    with ServerHarness(served.folder).http as http:
        if stream:
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                next(reply.iter_raw())
        else:
            with pytest.raises(Exception, match="timed out"):
                http.post("/v1/chat/completions", json=body, timeout=0.3)
    took_s = wait_until(lambda: served.stats(model)["active_requests"] == 0)
    assert took_s < 1.0
    served.chat(model, "a")
    assert served.stats(model)["stats"]["requests_total"]["cancelled"] == 1


def load_events(served: ServerHarness, model: str) -> list[dict[str, Any]]:
    body = {"model": model, "stream": True, "options": {"ctx": 512}}
    text = served.http.post("/v1/models/load", json=body).text
    return [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]


def test_load_with_progress_and_info(served: ServerHarness) -> None:
    events = load_events(served, served.model("loading", load_s=0.5))
    shares = [event["progress"] for event in events[:-1]]
    assert shares == sorted(shares)
    assert 0 < shares[-2] < 1
    assert shares[-1] == 1
    assert events[-1]["model"]["name"] == "loading"
    assert events[-1]["model"]["options"]["ctx"] == 512


def test_each_load_has_progress_and_a_loaded_model_has_none(served: ServerHarness) -> None:
    model = served.model("short")
    *progress, _ = load_events(served, model)
    assert progress[-1]["progress"] == 1
    (event,) = load_events(served, model)
    assert event.keys() == {"model"}


def test_usage_is_kept_with_many_at_once(served: ServerHarness) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = served.model(token_s=0.001)
    with ThreadPoolExecutor(16) as pool:
        texts = [f"{number} {WORDS}" for number in range(48)]
        answers = list(pool.map(lambda text: served.chat(model, text).json(), texts))
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == texts


@pytest.mark.parametrize("count", [0, 2])
def test_the_drawn_token_is_among_the_top_logprobs(served: ServerHarness, count: int) -> None:
    body = {"model": served.model("drawn"), "prompt": "one two", "logprobs": count}
    logprobs = served.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["one", " two"]
    assert logprobs["top_logprobs"] == [{"one": -0.5}, {" two": -0.5}]
