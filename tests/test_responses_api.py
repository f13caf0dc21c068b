"""OpenAI's Responses API: its own Python client against the real server, and the conversions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import TypeAdapter
from real_server import RealServer, real_server

from localgen.backends.errors import InvalidRequest, NotFound
from localgen.backends.types import Delta, Finished, Message, Timings, ToolCall, ToolCallDelta
from localgen.server.anthropic.schema import MessagesRequest
from localgen.server.requests.turns import join_turns
from localgen.server.responses_api.items import InputItem, to_messages
from localgen.server.responses_api.schema import ResponsesRequest
from localgen.server.responses_api.serializer import ResponsesSerializer
from localgen.server.responses_api.store import MAX_RESPONSES, ResponseStore, StoredResponse

QUESTION = "What is 17 + 25?"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
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
def client(server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60)


def test_an_answer_and_what_follows_it(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input=QUESTION, temperature=0)
    assert (first.output_text, first.status) == ("17 + 25 = 42.", "completed")
    assert first.usage is not None
    second = client.responses.create(
        model="tiny",
        input="And what is the capital of France?",
        temperature=0,
        previous_response_id=first.id,
    )
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="is not stored") as gone:
        client.responses.retrieve(second.id)
    assert gone.value.param is None
    assert "send the whole input" not in gone.value.message


@pytest.mark.parametrize("nothing", ["", []])
def test_an_empty_input_is_named(client: openai.OpenAI, nothing: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="input must not be empty") as refused:
        client.responses.create(model="tiny", input=nothing)
    assert refused.value.param == "input"


def test_store_false_keeps_nothing(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input=QUESTION, max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError, match="send the whole input"):
        client.responses.create(model="tiny", input="x", previous_response_id=answer.id)


def test_a_stream_is_the_whole_response(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input=QUESTION, instructions="Be short.", temperature=0
    ) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text
    assert final.instructions == "Be short."


def test_a_cut_response_is_incomplete(client: openai.OpenAI) -> None:
    cut = client.responses.create(model="tiny", input=QUESTION, max_output_tokens=2, temperature=0)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].model_dump()["status"] == "incomplete"


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": [WEATHER], "parallel_tool_calls": False}
    with client.responses.stream(
        input="What is the weather in Paris?",
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=300,
        **asked,
    ) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    call = first.output[-1]
    assert call.type == "function_call"
    assert "city" in json.loads(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    asked |= {"tool_choice": "none", "max_output_tokens": 5}
    stateful = client.responses.create(input=[result], previous_response_id=first.id, **asked)
    whole: list[Any] = [
        {"role": "user", "content": "What is the weather in Paris?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        result,
    ]
    stateless = client.responses.create(input=whole, **asked)
    assert stateful.usage is not None
    assert stateless.usage is not None
    assert stateful.usage.input_tokens == stateless.usage.input_tokens


def test_an_answer_of_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    answer = client.responses.create(model="tiny", input=QUESTION, text=wanted, temperature=0)
    assert set(json.loads(answer.output_text)) == {"ok"}


def test_what_is_not_supported_is_named(server: RealServer) -> None:
    for fields, reason in (
        ({"background": True}, "background is not supported"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"tools": [{"type": "web_search"}]}, "type web_search is not supported"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call' is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]: this model reads no images",
        ),
        ({"truncation": "half"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "no tool 'f'"),
    ):
        body = {"model": "tiny", "input": QUESTION} | fields
        reply = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
        assert reply.status_code == 400, reply.text
        assert reason in reply.json()["error"]["message"]


def test_fields_that_change_no_token_are_accepted() -> None:
    body = {
        "input": QUESTION,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "safety_identifier": "me",
        "background": False,
        "truncation": "disabled",
        "stream_options": {"include_obfuscation": False},
        "text": {"verbosity": "low"},
        "reasoning": {"effort": None, "summary": "auto"},
    }
    assert ResponsesRequest.model_validate(body).to_sampling_params().json_schema is None


def items(*given: dict[str, Any]) -> list[Message]:
    return to_messages(TypeAdapter(list[InputItem]).validate_python(list(given)))


def test_items_of_an_answer_are_one_message() -> None:
    thought = [{"type": "reasoning_text", "text": "hm"}]
    called = {"type": "function_call", "call_id": "c", "name": "add"}
    assert items(
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": thought, "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        called | {"arguments": '{"a": 1}'},
        called | {"call_id": "d", "arguments": '{"a": '},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"type": "function_call_output", "call_id": "d", "output": "3"},
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": "c"},
    ) == [
        Message("system", "Be kind."),
        Message("user", "a"),
        Message(
            "assistant",
            "b",
            "hm",
            (
                ToolCall("c", "add", '{"a": 1}'),
                ToolCall("d", "add", '{"incomplete_arguments": "{\\"a\\": "}'),
            ),
        ),
        Message("tool", "2", tool_call_id="c", name="add"),
        Message("tool", "3", tool_call_id="d", name="add"),
        Message("user", "c"),
    ]


def test_arguments_that_are_no_object_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="arguments is not a JSON object"):
        items({"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"})


def test_neighbouring_turns_of_one_role_are_joined() -> None:
    system, user, answer = Message("system", "a"), Message("user", "b"), Message("assistant", "c")
    assert join_turns([system, system, user]) == (Message("system", "a\n\na"), user)
    assert join_turns([user, user, answer, user]) == (Message("user", "b\n\nb"), answer, user)
    assert join_turns([answer, answer]) == (answer, answer)
    assert join_turns([]) == ()
    turns = [{"role": "user", "content": text} for text in ("a", "b")]
    fields = MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 5, "messages": turns}
    ).to_request_fields()
    assert fields["messages"] == (Message("user", "a\n\nb"),)


def finished(reason: str) -> Finished:
    return Finished(
        request_id="r",
        reason=reason,
        timings=Timings(cache_n=3),
        prompt_tokens=10,
        completion_tokens=9,
        ctx=100,
    )


def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    kept: list[tuple[Message, dict[str, Any]]] = []
    serializer = ResponsesSerializer("resp_r", "m", 1, {}, lambda *ended: kept.append(ended), {})
    events: list[Any] = [
        *serializer.choice_delta(0, Delta("r", "So", 3, reasoning="see")),
        *serializer.choice_delta(
            0, Delta("r", "", 4, tool_calls=(ToolCallDelta(0, "", "a", "f"),))
        ),
        *serializer.choice_delta(0, Delta("r", "", 9, tool_calls=(ToolCallDelta(0, "{}"),))),
        *serializer.choice_end(0, finished("tool_calls")),
        *serializer.stream_end(finished("tool_calls")),
    ]
    ids = [event["item"]["id"] for event in events if event["type"].endswith("item.added")]
    assert ids == ["rs_r_0", "msg_r_1", "fc_r_2"]
    last = events[-1]
    assert last["type"] == "response.completed"
    assert [item["type"] for item in last["response"]["output"]] == [
        "reasoning",
        "message",
        "function_call",
    ]
    assert last["response"]["output"][2]["arguments"] == "{}"
    usage = last["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}
    answer = Message("assistant", "So", "see", (ToolCall("a", "f", "{}"),))
    assert kept == [(answer, last["response"])]


def test_an_error_in_a_stream_is_a_failed_response() -> None:
    made = ResponsesSerializer("resp_r", "m", 1, {}, lambda *_: None, {})
    made.choice_start(0)
    name, data = made.framing.encode_error("timeout", "too late").decode().split("\n")[:2]
    event = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}" == "event: response.failed"
    assert event["sequence_number"] == 2
    assert (event["response"]["status"], event["response"]["error"]["code"]) == (
        "failed",
        "timeout",
    )


def test_functions_in_a_namespace() -> None:
    """As Codex sends them; a call has the namespace beside the name."""
    grouped = {"type": "namespace", "name": "agents", "tools": [WEATHER | {"strict": False}]}
    request = ResponsesRequest.model_validate({"input": "x", "tools": [WEATHER, grouped]})
    fields = request.to_request_fields(request.to_conversation(()))
    assert [tool.name for tool in fields["tools"]] == ["weather", "agents.weather"]
    made = ResponsesSerializer("resp_r", "m", 1, {}, lambda *_: None, request.namespaces())
    call = (ToolCallDelta(0, "{}", "a", "agents.weather"),)
    made.choice_delta(0, Delta("r", "", 1, tool_calls=call))
    made.choice_end(0, finished("tool_calls"))
    item = made.items[0]
    assert (item["namespace"], item["name"]) == ("agents", "weather")
    (message,) = items(item)
    assert message.tool_calls == (ToolCall("a", "agents.weather", "{}"),)


def test_the_store_is_bounded_and_private() -> None:
    store = ResponseStore()
    for number in range(MAX_RESPONSES + 1):
        store.put(str(number), StoredResponse("me", (Message("user", "x"),), {}))
    assert store.get("1", "me").account == "me"
    for name, account in (("0", "me"), ("1", "you")):
        with pytest.raises(NotFound):
            store.get(name, account)
    bulky = StoredResponse("me", (), {"metadata": {"a": "x" * (1 << 20)}})
    for number in range(65):
        store.put(f"bulky {number}", bulky)
    with pytest.raises(NotFound):
        store.get("bulky 0", "me")
    store.put("large", StoredResponse("me", (Message("user", "x" * (63 << 20)),), {}))
    with pytest.raises(NotFound):
        store.get("1", "me")
    assert store.get("large", "me")
    store.delete("large", "me")
    store.put("new", StoredResponse("me", (Message("user", "x"),), {}))
    assert store.get("new", "me")
