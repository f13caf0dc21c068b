"""Every error: its status, its format, and the field it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import (
    MANY_WORDS,
    WORDS,
    ServerHarness,
    chat_body,
    in_thread,
    server_harness,
    wait_until,
)

from localgen.server.http import json_limits

JSON_HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


def refusal(reply: Any, status: int, code: str) -> dict[str, Any]:
    """The error object of a rejected request with this status and code."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "Traceback" not in error["message"]
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "unknown field temprature"),
        ({"messagess": []}, "messagess", "unknown field messagess"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"stream": "no"}, "stream", "must be true or false"),
        ({"max_tokens": "5"}, "max_tokens", "must be a whole number"),
        ({"model": 5}, "model", "must be a string"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"min_tokens": -1}, "min_tokens", "must be at least 0"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "give one"),
        ({"n": 17}, "n", "must be at most 16"),
        ({"n": 0}, "n", "must be at least 1"),
        ({"n": True}, "n", "must be a whole number"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"priority": 1e23}, "priority", "must be a whole number"),
        ({"priority": 2**63}, "priority", "must be below"),
        ({"max_tokens": 2**63}, "max_tokens", "must be below"),
        ({"ctx": 10**400}, "ctx", "must be below"),
        ({"top_k": 2**31}, "top_k", "must be below"),
        ({"repeat_last_n": -(2**40)}, "repeat_last_n", "must be at least"),
        ({"stop_token_ids": [1, 2**31]}, "stop_token_ids[1]", "must be below"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias.2147483648.[key]", "must be below"),
        ({"model": "a\ud800"}, "model", "surrogate"),
        ({"user": "\udfff"}, "user", "surrogate"),
        ({"stop": "\ud800"}, "stop", "surrogate"),
        ({"dry_sequence_breakers": ["a", "\ud800"]}, "dry_sequence_breakers[1]", "surrogate"),
        (
            {"messages": [{"role": "user", "content": "x\ud800"}]},
            "messages[0].content",
            "surrogate",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
            "messages[0].content[0].text",
            "surrogate",
        ),
        ({"\ud800": 1}, "?", "surrogate"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be at most 20"),
        ({"stop": ["a", ""]}, "stop[1]", "stop[1] must not be empty"),
        ({"seed": "a"}, "seed", "must be a whole number"),
        ({"messages": []}, "messages", "messages must not be empty"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word.[key]", "valid integer"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    served: ServerHarness, fields: dict[str, Any], param: str, says: str
) -> None:
    # lone surrogates, which UTF-8 cannot hold, are sent escaped
    content = json.dumps(chat_body(served.model()) | fields)
    headers = {"content-type": "application/json"}
    reply = served.http.post("/v1/chat/completions", content=content, headers=headers)
    error = refusal(reply, 400, "invalid_request")
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{not json", "not valid JSON"),
        (b'{"messages": [],\n "n": 1 2}', "Expecting ',' delimiter: line 2 column 9 (char 25)"),
        (b'{"model": "m', "Unterminated string starting at: line 1 column 11 (char 10)"),
        (b"[1, 2]", "must be a JSON object"),
        (b"", "body is missing"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "finite"),
    ],
)
def test_invalid_body_is_rejected(served: ServerHarness, content: bytes, says: str) -> None:
    headers = {"content-type": "application/json"}
    reply = served.http.post("/v1/chat/completions", content=content, headers=headers)
    assert says in refusal(reply, 400, "invalid_request")["message"]


def test_text_and_tokens_of_a_completion(served: ServerHarness) -> None:
    for prompt, param in (("\ud800", "prompt"), ([1, 10**400], "prompt")):
        content = json.dumps({"model": served.model(), "prompt": prompt})
        headers = {"content-type": "application/json"}
        reply = served.http.post("/v1/completions", content=content, headers=headers)
        assert refusal(reply, 400, "invalid_request")["param"] == param


def bodies_with(value: str, model: str) -> list[tuple[str, str]]:
    """Routes and bodies with a JSON value where the API takes any JSON, and where it does not."""
    turn = {"role": "user", "content": "a"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "VALUE"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": "VALUE"}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": "VALUE"}}
    chats: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "VALUE"}]},
        {"messages": [turn, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [turn], "tools": [tool]},
        {"messages": [turn], "response_format": schema},
        {"messages": [turn], "logit_bias": "VALUE"},
    ]
    bodies = [json.dumps({"model": model} | chat).replace('"VALUE"', value) for chat in chats]
    return [(route, body) for body in bodies for route in ("/v1/chat/completions", "/api/chat")]


@pytest.mark.parametrize("depth", [150, 300, 900, 5_000])
def test_deeply_nested_bodies_are_rejected(served: ServerHarness, depth: int) -> None:
    value = '{"properties": ' * depth + '"leaf"' + "}" * depth
    limit = json_limits.MAX_DEPTH
    for route, body in bodies_with(value, served.model()):
        reply = served.http.post(route, content=body, headers=JSON_HEADERS)
        if depth < limit:
            assert reply.status_code < 500, (body[:200], reply.text)
            continue
        assert reply.status_code == 400, (body[:200], reply.text)
        assert "nested too deeply" in reply.text
        assert f"at most {limit}" in reply.text


def test_brackets_in_strings_are_not_nesting(served: ServerHarness) -> None:
    text = '[{"' * 1_000 + "\\"
    assert served.chat(served.model(), text).status_code == 200


def test_invalid_keep_alive_is_rejected(served: ServerHarness) -> None:
    body = {"model": served.model(), "keep_alive": "soon"}
    error = refusal(served.http.post("/v1/models/load", json=body), 400, "invalid_request")
    assert error["param"] == "keep_alive"
    assert "keep_alive=soon: give a time such as 30s" in error["message"]


def test_form_body_is_rejected(served: ServerHarness) -> None:
    reply = served.http.post("/v1/chat/completions", data={"model": "tiny"})
    assert "application/json" in refusal(reply, 400, "invalid_request")["message"]


def test_unknown_paths_and_methods(served: ServerHarness) -> None:
    assert "/v1/nothing" in refusal(served.http.get("/v1/nothing"), 404, "not_found")["message"]
    reply = served.http.get("/v1/chat/completions")
    refusal(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [True, False])
def test_errors_before_the_first_token_are_statuses(served: ServerHarness, stream: bool) -> None:
    too_long = " ".join(["word"] * 1001)
    error = refusal(
        served.chat(served.model(), too_long, stream=stream), 400, "context_length_exceeded"
    )
    assert error["message"] == "prompt is 1001 tokens, context is 1000"
    refusal(served.chat("no/such-model", stream=stream), 404, "model_not_found")
    missing = str(served.folder / "missing.gguf")
    assert missing in refusal(served.chat(missing), 404, "model_not_found")["message"]


def test_full_queue_is_rejected(served: ServerHarness) -> None:
    model = served.model("narrow", token_s=0.02, max_queue=1)
    served.chat(model, "a")
    events = served.events(model, MANY_WORDS)
    next(events)
    reply = served.chat(model, "b")
    error = refusal(reply, 429, "queue_full")
    assert error["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) >= 1
    events.close()


def test_what_cannot_be_taken_is_refused_without_asking_the_engine(served: ServerHarness) -> None:
    model = served.model("brimful", token_s=0.02)
    body = {"model": model, "options": {"max_queue": 1}}
    assert served.http.post("/v1/models/load", json=body).status_code == 200
    # four run and one waits: this fake engine would accept a sixth
    streams = [served.events(model, MANY_WORDS) for _ in range(5)]
    for stream in streams:
        next(stream)
    error = refusal(served.chat(model, "b"), 429, "queue_full")
    assert "5 requests are running or waiting, the limit is 5" in error["message"]
    refusal(served.chat(model, "b", n=6), 429, "queue_full")
    streams.pop().close()
    wait_until(lambda: served.chat(model, "b").status_code == 200)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    ("code", "status"),
    [("load_failed", 500), ("out_of_memory", 507), ("invalid_request", 400)],
)
def test_failed_load_has_its_status(served: ServerHarness, code: str, status: int) -> None:
    model = served.model(f"broken-{code}", fail="broken.gguf: not a model", code=code)
    error = refusal(served.chat(model), status, code)
    assert error["message"] == "broken.gguf: not a model"
    served.model(f"broken-{code}")
    assert served.chat(model).status_code == 200, "another try loads it again"


def test_load_errors_in_a_stream(served: ServerHarness) -> None:
    unknown = {"model": "no-such-model", "stream": True}
    refusal(served.http.post("/v1/models/load", json=unknown), 404, "model_not_found")
    slow = {"model": served.model("bad-slow", fail="bad", load_s=0.5), "stream": True}
    text = served.http.post("/v1/models/load", json=slow).text
    assert '"code":"load_failed"' in text.strip().split("\n\n")[-1]


def test_invalid_load_options_are_rejected(served: ServerHarness) -> None:
    def load(options: dict[str, Any]) -> Any:
        body = {"model": served.model("optional"), "options": options}
        return served.http.post("/v1/models/load", json=body)

    error = refusal(load({"contxt": 5}), 400, "invalid_request")
    assert error["param"] == "options.contxt"
    assert "Expected `int" in refusal(load({"ctx": "big"}), 400, "invalid_request")["message"]
    assert refusal(load({"ctx": 10**400}), 400, "invalid_request")["param"] == "options.ctx"
    assert load({"ctx": 1024}).status_code == 200
    assert load({"ctx": 1024, "parallel": 4}).status_code == 200
    assert "trained for 4,096" in refusal(load({"ctx": 5000}), 400, "invalid_request")["message"]
    error = refusal(load({"ctx": 1024, "parallel": 2}), 409, "model_busy")
    assert error["param"] == "parallel"
    assert "with --parallel 4, not 2" in error["message"]
    assert "localgen stop optional" in error["message"]


def test_a_request_waits_for_a_load_and_may_leave(served: ServerHarness) -> None:
    model = served.model("very-slow", load_s=1.0)
    with ServerHarness(served.folder).http as http, pytest.raises(Exception, match="timed out"):
        http.post("/v1/chat/completions", json=chat_body(model, WORDS), timeout=0.2)
    wait_until(lambda: served.stats(model)["state"] == "loaded")
    assert served.stats(model)["active_requests"] == 0


def test_one_load_for_many_requests(served: ServerHarness) -> None:
    model = served.model("shared", load_s=0.3)
    answers: list[int] = []
    threads = [in_thread(lambda: answers.append(served.chat(model).status_code)) for _ in range(8)]
    for thread in threads:
        thread.join()
    assert answers == [200] * 8
    assert served.loads(model) == 1
