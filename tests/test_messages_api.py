"""Anthropic's Messages API: its own Python client against the real server, and the conversions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from real_server import RealServer, real_server

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Delta, Finished, Message, Timings, ToolCall, ToolCallDelta
from localgen.server.anthropic.content import AnthropicMessage, to_messages
from localgen.server.anthropic.schema import MessagesRequest
from localgen.server.anthropic.serializer import MessageSerializer, anthropic_error_body
from localgen.server.requests.choices import FinishedChoice

QUESTION: Any = {"role": "user", "content": "What is 17 + 25?"}
# the client has no samplers any more
GREEDY = {"temperature": 0}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as started:
        yield started


@pytest.fixture(scope="module")
def client(server: RealServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0, timeout=60)


def test_an_answer(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="tiny", max_tokens=30, messages=[QUESTION], extra_body=GREEDY
    )
    assert [block.model_dump()["text"] for block in answer.content] == ["17 + 25 = 42."]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "tiny", "end_turn")
    again = client.messages.create(
        model="tiny", max_tokens=30, messages=[QUESTION], extra_body=GREEDY
    )
    assert again.usage.cache_read_input_tokens
    total = again.usage.input_tokens + again.usage.cache_read_input_tokens
    assert total == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_a_stream_is_the_whole_answer(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="tiny", max_tokens=30, messages=[QUESTION], extra_body=GREEDY
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.content[0].model_dump()["text"] == "17 + 25 = 42."
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 12


def test_the_reason_of_the_end(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [QUESTION], "extra_body": GREEDY}
    cut = client.messages.create(**asked, max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = client.messages.create(**asked, max_tokens=30, stop_sequences=["never", " ="])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " =")
    assert stopped.content[0].model_dump()["text"] == "17 + 25"


def test_the_beginning_of_an_answer_is_continued(client: anthropic.Anthropic) -> None:
    begun: Any = {"role": "assistant", "content": "17 + 25 ="}
    answer = client.messages.create(
        model="tiny", max_tokens=9, messages=[QUESTION, begun], extra_body=GREEDY
    )
    assert answer.content[0].model_dump()["text"] == " 42."


def test_a_call_and_its_result(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 300,
        "tools": [WEATHER],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    with client.messages.stream(messages=[QUESTION], **asked) as stream:
        partial = "".join(event.partial_json for event in stream if event.type == "input_json")
        answer = stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    assert call.type == "tool_use"
    assert call.name == "weather"
    assert call.input == json.loads(partial)
    turns: list[Any] = [
        QUESTION,
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}],
        },
    ]
    asked |= {"tool_choice": {"type": "none"}, "max_tokens": 5}
    assert client.messages.create(messages=turns, **asked).usage.output_tokens > 0


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    system: Any = [
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "And short."},
    ]
    asked: dict[str, Any] = {"model": "tiny", "messages": [QUESTION], "system": system}
    counted = client.messages.count_tokens(**asked, tools=[WEATHER]).input_tokens
    answer = client.messages.create(**asked, tools=[WEATHER], max_tokens=1)
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    long: Any = {"role": "user", "content": "far more than fits " * 2000}
    assert client.messages.count_tokens(model="tiny", messages=[long]).input_tokens > 2048


def test_errors_have_anthropic_s_form(client: anthropic.Anthropic, server: RealServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nope", max_tokens=3, messages=[QUESTION])
    assert missing.value.body["type"] == "error"  # type: ignore[index]
    for fields, reason in (
        ({"max_tokens": "3"}, "max_tokens must be a whole number"),
        ({"temprature": 1}, "unknown field temprature"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "leave it out"),
        ({"tools": [WEATHER, WEATHER]}, "duplicate tool weather"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name 'a b': use 1 to 128 letters"),
        ({"tools": [WEATHER, WEATHER | {"name": ""}]}, "tools[1].name ''"),
        ({"tools": [WEATHER | {"name": "x" * 129}]}, "use 1 to 128 letters"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "no tool 'x' in tools (none)"),
        ({"tool_choice": {"type": "any"}}, "tool_choice any needs tools"),
        ({"messages": []}, "messages"),
    ):
        body = {"model": "tiny", "max_tokens": 3, "messages": [QUESTION]} | fields
        reply = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert reason in error["message"]
    kinds = {code: anthropic_error_body(code, "")["error"]["type"] for code in ("queue_full", "x")}
    assert kinds == {"queue_full": "rate_limit_error", "x": "api_error"}


def test_fields_that_change_no_token_are_accepted() -> None:
    body = {
        "model": "m",
        "max_tokens": 5,
        "messages": [QUESTION],
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
    }
    request = MessagesRequest.model_validate(body)
    assert request.to_request_fields()["thinking"] is None
    assert request.to_sampling_params().thinking_budget == 1024
    off = MessagesRequest.model_validate(body | {"thinking": {"type": "disabled"}})
    assert off.to_request_fields()["thinking"] is False


def test_a_schema_of_the_answer() -> None:
    wanted = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    body = {"model": "m", "max_tokens": 5, "messages": [QUESTION], "output_config": wanted}
    params = MessagesRequest.model_validate(body).to_sampling_params()
    assert params.json_schema == '{"type": "object"}'


def converted(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return to_messages([AnthropicMessage.model_validate(message) for message in messages])


def test_blocks_become_messages() -> None:
    used = {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}
    assert converted(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "so"},
                used,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ) == (
        Message("user", "a\nb"),
        Message("assistant", "so", "hm", (ToolCall("t", "add", '{"a": 1}'),)),
        Message("tool", "Error: no", tool_call_id="t", name="add"),
        Message("user", "and?"),
    )


@pytest.mark.parametrize(
    ("role", "block", "reason"),
    [
        ("user", {"type": "image", "source": {}}, "reads no images"),
        ("user", {"type": "document"}, "send their text"),
        ("user", {"type": "search_result"}, "'search_result' is not supported"),
        ("user", {"type": "thinking", "thinking": "a"}, "not valid in a message of user"),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}, "in a message of assistant"),
        (
            "user",
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]},
            "content[0].content[0]: this model reads no images",
        ),
    ],
)
def test_blocks_that_cannot_be_read_are_named(role: str, block: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        converted({"role": role, "content": [block]})
    assert reason in refused.value.message


def test_reasoning_text_and_calls_are_blocks_in_their_order() -> None:
    deltas = [
        Delta("r", "", 1, reasoning="let me "),
        Delta("r", "So", 3, reasoning="see"),
        Delta("r", ":", 4, tool_calls=(ToolCallDelta(0, "", "a", "f"), ToolCallDelta(0, '{"x"'))),
        Delta("r", "", 9, tool_calls=(ToolCallDelta(0, ": 1}"), ToolCallDelta(1, "{}", "b", "g"))),
    ]
    end = Finished(
        request_id="r",
        reason="tool_calls",
        timings=Timings(cache_n=3),
        prompt_tokens=10,
        completion_tokens=9,
        ctx=100,
    )
    serializer = MessageSerializer("msg_r", "m", 50, ())
    events: list[Any] = [event for delta in deltas for event in serializer.choice_delta(0, delta)]
    events += serializer.choice_end(0, end)
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(start["index"], start["content_block"]["type"]) for start in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
        (3, "tool_use"),
    ]
    assert sum(event["type"] == "content_block_stop" for event in events) == 4
    pieces: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            (text,) = [value for name, value in event["delta"].items() if name != "type"]
            pieces[event["index"]] = pieces.get(event["index"], "") + text
    assert pieces == {0: "let me see", 1: "So:", 2: '{"x": 1}', 3: "{}"}
    whole = MessageSerializer("msg_r", "m", 50, ()).full_response(
        [FinishedChoice(deltas, end)], end
    )
    assert [list(block.values())[-1] for block in whole["content"]] == ["", "So:", {"x": 1}, {}]
    assert whole["content"][0]["thinking"] == "let me see"
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 9,
    }


@pytest.mark.parametrize(
    ("tokens", "reason"), [(50, "max_tokens"), (49, "model_context_window_exceeded")]
)
def test_a_full_context_is_not_a_limit_of_the_request(tokens: int, reason: str) -> None:
    end = Finished(
        request_id="r",
        reason="length",
        timings=Timings(),
        prompt_tokens=10,
        completion_tokens=tokens,
        ctx=59,
    )
    last: Any = MessageSerializer("msg_r", "m", 50, ()).stream_end(end)[0]
    assert last["delta"]["stop_reason"] == reason


def test_names_of_tools_may_be_longer_than_openai_s() -> None:
    tool = WEATHER | {"name": "mcp__plugin_weather_server__" + "x" * 100}
    body = MessagesRequest(model="m", max_tokens=1, messages=[QUESTION], tools=[tool])
    (parsed,) = body.to_request_fields()["tools"]
    assert parsed.name == tool["name"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_cancelled_answer_does_not_claim_to_be_complete(is_stream: bool) -> None:
    serializer = MessageSerializer("msg_1", "m", 100, ())
    delta = Delta("r", "one two", 2)
    cancelled = Finished(
        request_id="r",
        reason="cancelled",
        timings=Timings(),
        prompt_tokens=3,
        completion_tokens=2,
        ctx=10,
    )
    if is_stream:
        serializer.choice_start(0)
        serializer.choice_delta(0, delta)
        serializer.choice_end(0, cancelled)
        (last, _) = serializer.stream_end(cancelled)
        assert isinstance(last, dict)
        assert last["delta"] == {"stop_reason": "pause_turn", "stop_sequence": None}
        return
    whole = serializer.full_response([FinishedChoice([delta], cancelled)], cancelled)
    assert whole["stop_reason"] == "pause_turn"
    assert whole["content"] == [{"type": "text", "text": "one two"}]
