"""Messages, tools and durations of Ollama's protocol, without a server."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from ollama._types import ChatResponse

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Delta, Finished, Timings, ToolCall, ToolCallDelta
from localgen.server.ollama import options
from localgen.server.ollama.messages import serialize_tool_calls
from localgen.server.ollama.models import gpu_fraction
from localgen.server.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from localgen.server.ollama.serializer import OllamaSerializer, chat_content, generate_content
from localgen.server.requests.choices import FinishedChoice
from localgen.server.requests.protocol import ResponseMetadata

END = Finished(
    request_id="r",
    reason="tool_calls",
    timings=Timings(prompt_ms=1.5, predicted_ms=2.5),
    prompt_tokens=3,
    completion_tokens=4,
    ctx=100,
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": list(messages), **fields}
    return OllamaChatRequest.model_validate(body).to_request_fields()


def answer() -> OllamaSerializer:
    start = ResponseMetadata(id="r", model="m", arrived_s=time.monotonic(), load_ms=0.25)
    return OllamaSerializer("asked", chat_content, start)


def calls(index: int, arguments: str, name: str | None = None) -> Delta:
    piece = ToolCallDelta(index, arguments, f"id{index}" if name else None, name)
    return Delta("r", "", 1, tool_calls=(piece,))


DELTAS = (
    Delta("r", "", 1, reasoning="Hm."),
    Delta("r", "I add.", 2),
    calls(0, '{"a": ', "add"),
    calls(0, "1}"),
    calls(1, "", "now"),
    calls(1, "{}"),
)


def test_tools_and_results_of_a_conversation() -> None:
    request = chat(
        {"role": "user", "content": "1 + 2, 3 + 4?"},
        {
            "role": "assistant",
            "thinking": "Two sums.",
            "tool_calls": [
                {"function": {"name": "add", "arguments": {"a": 1}}},
                {"function": {"name": "add", "arguments": {"a": 3}, "index": 1}, "id": "own"},
                {"function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_name": "now", "content": "noon"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "7"},
        tools=[ADD],
    )
    (tool,) = request["tools"]
    assert (tool.name, tool.description) == ("add", "Adds.")
    assert json.loads(tool.parameters)["properties"] == {"a": {"type": "integer"}}
    _, called, noon, first, second = request["messages"]
    assert called.reasoning == "Two sums."
    ids = [call.id for call in called.tool_calls]
    assert [json.loads(call.arguments) for call in called.tool_calls] == [{"a": 1}, {"a": 3}, {}]
    assert len(set(ids)) == 3
    assert ids[1] == "own"
    assert (noon.tool_call_id, noon.name, noon.content) == (ids[2], "now", "noon")
    assert [first.tool_call_id, second.tool_call_id] == ids[:2]
    assert first.name == "add"


def test_a_result_that_nobody_asked_for_is_told_as_it_is() -> None:
    (result,) = chat({"role": "tool", "tool_name": "now", "content": "noon"})["messages"]
    assert (result.tool_call_id, result.name) == (None, "now")


@pytest.mark.parametrize(
    ("think", "fields"),
    [
        (None, {"thinking": None}),
        (True, {"thinking": True}),
        (False, {"thinking": False}),
        ("high", {"reasoning_effort": "high"}),
    ],
)
def test_think_values(think: Any, fields: dict[str, Any]) -> None:
    request = chat({"role": "user", "content": "a"}, think=think)
    assert {name: request.get(name) for name in fields} == fields
    alone = OllamaGenerateRequest(model="m", prompt="a", think=think).to_request_fields()
    assert {name: alone.get(name) for name in fields} == fields


def test_raw_prompts_do_not_think() -> None:
    raw = OllamaGenerateRequest(model="m", prompt="a", raw=True, think=False)
    assert raw.to_request_fields() == {"prompt": "a"}
    with pytest.raises(InvalidRequest, match="think"):
        OllamaGenerateRequest(model="m", prompt="a", raw=True, think=True).to_request_fields()


def test_a_whole_answer_with_thoughts_and_calls() -> None:
    printed = answer().full_response([FinishedChoice(DELTAS, END)], END)
    said = ChatResponse(**printed)
    assert said.model == "asked"
    assert said.message.thinking == "Hm."
    assert said.message.content == "I add."
    assert said.message.tool_calls is not None
    made = [(call.function.name, call.function.arguments) for call in said.message.tool_calls]
    assert made == [("add", {"a": 1}), ("now", {})]
    assert said.done_reason == "stop"
    assert (said.prompt_eval_duration, said.eval_duration) == (1_500_000, 2_500_000)
    assert (said.prompt_eval_count, said.eval_count, said.load_duration) == (3, 4, 250_000)


def test_a_streamed_answer_has_whole_calls() -> None:
    printer = answer()
    lines: list[Any] = [line for delta in DELTAS for line in printer.choice_delta(0, delta)]
    lines += [*printer.choice_end(0, END), *printer.stream_end(END)]
    said = [ChatResponse(**line) for line in lines]
    assert [part.message.thinking for part in said if part.message.thinking] == ["Hm."]
    assert "".join(part.message.content or "" for part in said) == "I add."
    made = [call for part in said for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in made] == [
        ("add", {"a": 1}),
        ("now", {}),
    ]
    assert [part.done for part in said] == [False] * (len(said) - 1) + [True]


def test_truncated_tool_call_is_text() -> None:
    printer = answer()
    for delta in DELTAS[2:3]:
        assert printer.choice_delta(0, delta) == []
    (line,) = (ChatResponse(**line) for line in printer.choice_end(0, END))  # type: ignore[arg-type]
    assert line.message.tool_calls is None
    assert line.message.content == 'add {"a": '


def test_a_deeply_nested_tool_call_is_text() -> None:
    arguments = "[" * 100_000
    assert serialize_tool_calls([ToolCall("a", "add", arguments)]) == (f"add {arguments}", [])


def test_pieces_of_a_generation() -> None:
    assert generate_content("a", "b", ()) == {"response": "a", "thinking": "b"}
    assert generate_content("a", "", ()) == {"response": "a"}


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        (90, 90.0),
        (1.5, 1.5),
        ("0", 0.0),
        ("300", 300.0),
        ("5m", 300.0),
        ("5m0s", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        (-1, None),
        ("-1", None),
        ("-1m", None),
    ],
)
def test_keep_alive(given: float | str, seconds: float | None) -> None:
    found = options.parse_ollama_keep_alive(given)
    assert found is not None
    assert found.seconds == (pytest.approx(seconds) if seconds is not None else None)


def test_no_keep_alive() -> None:
    assert options.parse_ollama_keep_alive(None) is None
    assert options.parse_ollama_keep_alive("") is None


@pytest.mark.parametrize("given", ["soon", "5 minutes", "m", "5m30", "1e3", "--1", "9" * 40])
def test_invalid_keep_alive_is_rejected(given: str) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive"):
        options.parse_ollama_keep_alive(given)


@pytest.mark.parametrize(
    ("processor", "share"),
    [("100% CPU", 0.0), ("100% GPU", 1.0), ("48%/52% CPU/GPU", 0.52), ("", 0.0)],
)
def test_the_share_on_a_gpu(processor: str, share: float) -> None:
    assert gpu_fraction(processor) == share
