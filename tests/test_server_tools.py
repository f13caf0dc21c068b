"""Tools and reasoning over HTTP: the real openai client, server, engine and model."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tool_templates import OPEN_THINKING

from localgen.backends.errors import ContextExceeded
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Delta, Message, Tool, ToolCall, ToolCallDelta
from localgen.client import Completion, LocalClient, TextDelta
from localgen.config import ServerSettings
from localgen.server.openai.schema import ChatRequest
from localgen.server.openai.tools import merge_tool_call_deltas

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[LocalClient]:
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        made = LocalClient(
            ServerSettings(runtime_dir=Path(folder) / "run", state_dir=Path(folder) / "state")
        )
        made.connect()
        made.load("tiny", LoadOptions(threads=1, threads_batch=1))
        yield made
        made.shutdown()
        made.close()


@pytest.fixture(scope="module")
def http(client: LocalClient) -> Iterator[httpx.Client]:
    socket = str(client._settings.socket_path)
    with httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def api(http: httpx.Client) -> openai.OpenAI:
    over_the_socket: Any = http
    return openai.OpenAI(base_url="http://localgen/v1", api_key="-", http_client=over_the_socket)


def test_a_conversation_with_a_tool(api: openai.OpenAI) -> None:
    """A call, its result, and the next request, as a program does it."""
    messages = list(ASKED)
    first = api.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=[WEATHER, TIME],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        max_tokens=300,
        seed=3,
    )
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    city = json.loads(call.function.arguments)["city"]
    assert len(city) <= 12
    notes = first.model_extra["localgen"]["notes"] if first.model_extra else []
    assert any("this model's chat template does not support tools" in note for note in notes)
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"},
    ]
    second = api.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=[WEATHER],
        max_tokens=20,
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens - 60


def test_streamed_calls_are_the_whole_ones(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": ASKED,
        "tools": [WEATHER, TIME],
        "tool_choice": "required",
        "max_tokens": 200,
        "temperature": 1,
        "seed": 5,
    }
    whole = api.chat.completions.create(**asked).choices[0]
    chunks = list(api.chat.completions.create(**asked, stream=True))
    calls: list[tuple[str, str]] = []
    for part in (p for c in chunks for p in c.choices[0].delta.tool_calls or []):
        assert part.function is not None
        if part.index == len(calls):
            assert part.id
            assert part.type == "function"
            calls.append((part.function.name or "", ""))
        name, arguments = calls[part.index]
        calls[part.index] = name, arguments + (part.function.arguments or "")
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    assert whole.message.tool_calls is not None
    functions: list[Any] = [call.function for call in whole.message.tool_calls]
    assert calls == [(function.name, function.arguments) for function in functions]
    assert len(chunks) > 3, "arguments come in pieces"


def test_the_client_s_own_accumulator_takes_our_stream(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(
        model="tiny",
        messages=ASKED,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        seed=3,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert "city" in json.loads(final.message.tool_calls[0].function.arguments)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": ASKED, "max_tokens": 5} | fields


def turn(role: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [*ASKED, {"role": role, **fields}]}


def called(**function: Any) -> list[dict[str, Any]]:
    return [{"id": "a", "type": "function", "function": {"name": "f", **function}}]


def test_a_prompt_filled_by_tools_says_how_much_they_take(client: LocalClient) -> None:
    def too_long(*tools: Tool, **more: Any) -> str:
        messages = (Message("user", "hi " * 40),)
        with pytest.raises(ContextExceeded) as caught:
            list(client.chat("tiny", messages, SamplingParams(), ctx=32, tools=tools, **more))
        return caught.value.message

    big = Tool("look", "word " * 200)
    alone = too_long()
    assert "tool" not in alone
    assert too_long(big, tool_choice="none") == alone
    found = re.search(
        r": ([\d,]+) tokens \(([\d,]+) of them describe 2 tools\), .* offer fewer tools",
        too_long(big, replace(big, name="see")),
    )
    assert found is not None
    whole, described = (int(number.replace(",", "")) for number in found.groups())
    num_alone = int(re.findall(r": (\d+) tokens", alone)[0])
    assert whole - described == num_alone


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "browser"}]}, "tools[0].type", "'function'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "letters, digits",
        ),
        ({"tools": [TIME, WEATHER, TIME]}, "tools[2].function.name", "duplicate tool time"),
        ({"tools": [TIME] * 257}, "tools", "more than 256"),
        ({"tools": [TIME], "tool_choice": "maybe"}, "tool_choice", "auto, none, required"),
        ({"tools": [TIME], "tool_choice": {"type": "x"}}, "tool_choice", "auto, none, required"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {
                "tools": [TIME],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
            },
            "tool_choice",
            "no tool 'weather' in tools (time)",
        ),
        (
            {
                "tools": [
                    TIME,
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "wish"}}},
                ]
            },
            "tools",
            "the parameters of f: the type must be object",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        (turn("tool", content="x"), "messages[1].tool_call_id", "set the id of the tool call"),
        (turn("tool", tool_call_id="a"), "messages[1].content", "missing"),
        (turn("assistant"), "messages[1].content", "missing"),
        (
            turn("assistant", tool_calls=called(arguments="[1]")),
            "messages[1].tool_calls[0].function.arguments",
            "not a JSON object",
        ),
        (
            turn("user", content="x", tool_calls=called()),
            "messages[1].tool_calls",
            "only valid for role assistant",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort", "leave reasoning_effort out"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'high'"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs",
            "leave chat_template_kwargs out",
        ),
        ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood", "unknown field"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "not both",
        ),
    ],
)
def test_invalid_tool_fields_are_named(
    http: httpx.Client, fields: dict[str, Any], param: str, says: str
) -> None:
    reply = http.post("http://localgen/v1/chat/completions", json=body(**fields))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        turn("assistant", content=None, tool_calls=called(arguments="")),
        turn("assistant", content="x", tool_calls=[], reasoning_content="hm"),
        turn("user", content="x", name="eve"),
        turn("user", content=[{"type": "text", "text": "x", "cache_control": {"type": "e"}}]),
        turn("assistant", content="x", reasoning="hm"),
        {"metadata": {"a": "b"}, "service_tier": "auto", "store": True, "verbosity": "low"},
        {"prompt_cache_key": "k", "safety_identifier": "me", "cache_prompt": False},
        {"prediction": {"type": "content", "content": "It is 42."}},
        {"skip_special_tokens": True, "add_generation_prompt": True},
        {
            "stream": True,
            "stream_options": {"continuous_usage_stats": True, "include_obfuscation": False},
        },
    ],
)
def test_tool_fields_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    asked = ChatRequest.model_validate(body(**fields)).to_request_fields()
    assert asked["tools"] == ()
    assert asked["parallel_tool_calls"] is True


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"seed": -1}, {"seed": None}),
        ({"seed": 2**32 + 5}, {"seed": 5}),
        ({"seed": -2}, {"seed": 2**32 - 2}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"max_tokens": -1}, {"max_tokens": None}),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            {"json_schema": '{"type": "object"}'},
        ),
    ],
)
def test_values_that_other_servers_take(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    params = ChatRequest.model_validate(body(**fields)).to_sampling_params()
    assert {name: getattr(params, name) for name in expected} == expected


def test_a_call_that_was_cut_is_sent_back() -> None:
    asked = turn("assistant", tool_calls=called(arguments='{"city": "Par'))
    request = ChatRequest.model_validate(body(**asked)).to_request_fields()
    (call,) = request["messages"][1].tool_calls
    assert json.loads(call.arguments) == {"incomplete_arguments": '{"city": "Par'}


def test_an_effort_of_none_is_what_a_model_without_reasoning_does(http: httpx.Client) -> None:
    asked = body(reasoning_effort="none")
    assert http.post("http://localgen/v1/chat/completions", json=asked).status_code == 200


def test_streamed_calls_are_assembled() -> None:
    deltas = [
        Delta("r", "", 1, (), "", (ToolCallDelta(0, "", "a", "f"), ToolCallDelta(0, '{"x"'))),
        Delta("r", "text", 2),
        Delta("r", "", 3, (), "", (ToolCallDelta(0, ": 1}"), ToolCallDelta(1, "{}", "b", "g"))),
    ]
    assert merge_tool_call_deltas(deltas) == [
        ToolCall("a", "f", '{"x": 1}'),
        ToolCall("b", "g", "{}"),
    ]


def test_thoughts_are_a_field_of_their_own(client: LocalClient, api: openai.OpenAI) -> None:
    client.unload("tiny")
    client.load("tiny", LoadOptions(threads=1, threads_batch=1, chat_template=OPEN_THINKING))
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": ASKED,
        "max_tokens": 60,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}},
        },
    }
    whole = api.chat.completions.create(**asked, temperature=0).choices[0].message
    thought = (whole.model_extra or {})["reasoning_content"]
    assert thought
    chunks = list(api.chat.completions.create(**asked, temperature=0, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas) == thought
    assert "".join(d.content or "" for d in deltas) == whole.content
    params = SamplingParams(temperature=0, max_tokens=60, json_schema='{"enum": ["yes", "no"]}')
    *texts, end = client.chat("tiny", [Message("user", ASKED[0]["content"])], params)
    assert isinstance(end, Completion)
    assert "".join(t.reasoning for t in texts if isinstance(t, TextDelta)) == thought
    client.unload("tiny")
