"""Tool calls of the built-in model match their schemas at temperature 1, in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hf_folders import TINY
from models import Bench, LoadedBench, Reply
from test_grammar import fits, random_schema
from tool_templates import FAMILIES

from localgen.backends.cuda.loader import load_cuda_model as load_cuda
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.prompt_renderer import TOOLS_IN_SYSTEM_NOTE
from localgen.backends.types import Failed, Message, Tool, ToolCall

CHAT = (Message("user", "What is the weather in Paris?"),)
CITY = {"type": "string", "maxLength": 12}
WEATHER = Tool(
    "weather",
    "The weather of a city",
    json.dumps({"type": "object", "properties": {"city": CITY}, "required": ["city"]}),
)
TIME = Tool("time")


def loading(template: str) -> LoadOptions:
    # a model this small does not benefit from more threads
    return LoadOptions(chat_template=template, threads=1, threads_batch=1)


@pytest.fixture(scope="module")
def bench_of() -> Iterator[Callable[[str], Bench]]:
    """The model with the template of a family."""
    benches: dict[str, Bench] = {}

    def of(family: str) -> Bench:
        if family not in benches:
            benches[family] = Bench(loading(FAMILIES[family]))
        return benches[family]

    yield of
    for bench in benches.values():
        bench.close()


def hot(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 300, "seed": seed, **more})


def ask(bench: Bench, params: SamplingParams, **request: Any) -> Reply:
    return bench.run([bench.submit(CHAT, params, **request)])[0]


def object_schema(dice: random.Random) -> dict[str, Any]:
    while (schema := random_schema(dice)).get("type") != "object":
        pass
    return schema


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "open-thinking"])
def test_required_calls_are_valid_under_random_schemas(
    bench_of: Callable[[str], Bench], family: str
) -> None:
    bench = bench_of(family)
    dice = random.Random(3)
    schemas = [object_schema(dice) for _ in range(16 if family == "hermes" else 5)]
    names = [
        bench.submit(
            CHAT,
            hot(seed),
            tools=(Tool("first", "", json.dumps(schema)), TIME),
            tool_choice="required" if seed % 2 else "first",
            parallel_tool_calls=seed % 8 == 0,
        )
        for seed, schema in enumerate(schemas)
    ]
    ended = 0
    for seed, (reply, schema) in enumerate(zip(bench.run(names), schemas, strict=True)):
        calls = reply.whole_calls
        assert len(calls) <= 1 or seed % 8 == 0
        if reply.finished.reason == "length":  # it went on calling, or thinking
            continue
        ended += 1
        assert reply.text == ""
        assert reply.finished.reason == "tool_calls"
        assert calls
        for name, arguments in calls:
            value = json.loads(arguments)
            assert name == "first" or (seed % 2 and name == "time" and value == {})
            assert name == "time" or fits(value, schema), (arguments, schema)
    # at this temperature the model would reason endlessly
    assert ended > (0 if family == "thinking" else len(schemas) / 2)


@pytest.mark.parametrize("family", ["described", "hermes", "xml", "llama", "mistral", "phi"])
def test_auto_may_call_and_need_not(bench_of: Callable[[str], Bench], family: str) -> None:
    bench = bench_of(family)
    plain = ask(bench, SamplingParams(temperature=0, max_tokens=30), tools=(WEATHER,))
    assert plain.finished.reason in ("stop", "length")
    assert plain.text
    assert not plain.calls
    # a bias towards the opening marker, which a call must follow
    opening = {"llama": '{"name"', "mistral": "[TOOL_CALLS]", "phi": "<|tool_call|>"}
    tokens = bench.model.tokenizer.encode(opening.get(family, "<tool_call>"))
    bias = dict.fromkeys(tokens, 12.0)
    names = [
        bench.submit(CHAT, hot(seed, logit_bias=bias, max_tokens=200), tools=(WEATHER, TIME))
        for seed in range(8)
    ]
    called = [reply for reply in bench.run(names) if reply.finished.reason == "tool_calls"]
    for reply in called:
        for name, arguments in reply.whole_calls:
            value = json.loads(arguments)
            assert value == {} if name == "time" else value.keys() == {"city"}


def test_calls_on_our_own_engine() -> None:
    options = LoadOptions(device="cpu", chat_template=FAMILIES["hermes"])
    bench = LoadedBench(
        load_cuda(ModelLoadRequest("tiny", str(TINY), options), lambda _share: None)
    )
    names = [
        bench.submit(
            CHAT, hot(seed), tools=(WEATHER,), tool_choice="required", parallel_tool_calls=False
        )
        for seed in range(6)
    ]
    for reply in bench.run(names):
        ((name, arguments),) = reply.whole_calls
        assert (name, reply.text, reply.finished.reason) == ("weather", "", "tool_calls")
        assert len(json.loads(arguments)["city"]) <= 12
    bench.close()


def test_none_and_no_tools_are_the_same(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("described")
    greedy = SamplingParams(temperature=0, max_tokens=30)
    without = ask(bench, greedy)
    none = ask(bench, greedy, tools=(WEATHER,), tool_choice="none")
    assert none.text == without.text
    assert none.finished.prompt_tokens == without.finished.prompt_tokens
    assert none.finished.notes == ()


def test_the_answer_says_that_tools_were_described(bench_of: Callable[[str], Bench]) -> None:
    for family, notes in (("described", (TOOLS_IN_SYSTEM_NOTE,)), ("hermes", ())):
        reply = ask(bench_of(family), hot(1), tools=(WEATHER,), tool_choice="required")
        assert reply.finished.notes == notes


def test_a_schema_beside_tools(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("hermes")
    schema = json.dumps({"type": "integer", "minimum": 0, "maximum": 9})
    kinds = set()
    for seed in range(8):
        bias = {bench_token(bench, "<"): 20.0 if seed % 2 else 0.0}
        params = hot(seed, json_schema=schema, logit_bias=bias)
        reply = ask(bench, params, tools=(TIME,), parallel_tool_calls=False)
        kinds.add(reply.finished.reason)
        if reply.finished.reason == "stop":
            assert reply.text in "0123456789"
        else:
            ((name, arguments),) = reply.whole_calls
            assert (name, json.loads(arguments)) == ("time", {})
    assert kinds == {"stop", "tool_calls"}


def bench_token(bench: Bench, text: str) -> int:
    return bench.model.tokenizer.encode(text)[-1]


def test_thoughts_are_no_content(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("open-thinking")
    reply = ask(bench, SamplingParams(temperature=0, max_tokens=20))
    assert reply.reasoning
    assert reply.text == ""


def test_stop_strings_are_for_content(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("hermes")
    params = hot(2, stop=("city", "{", "a"))
    reply = ask(bench, params, tools=(WEATHER,), tool_choice="weather", parallel_tool_calls=False)
    assert reply.finished.reason == "tool_calls"
    assert reply.finished.stop not in params.stop


def test_truncated_call(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("hermes")
    whole = ask(bench, hot(2), tools=(WEATHER,), tool_choice="weather", parallel_tool_calls=False)
    tokens = whole.finished.completion_tokens
    for most in range(1, tokens):
        reply = ask(bench, hot(2, max_tokens=most), tools=(WEATHER,), tool_choice="weather")
        assert reply.finished.reason == "length"
        for _, arguments in reply.whole_calls:
            assert whole.whole_calls[0][1].startswith(arguments)


def test_logprobs_of_calls(bench_of: Callable[[str], Bench]) -> None:
    reply = ask(bench_of("hermes"), hot(2, logprobs=1), tools=(TIME,), tool_choice="required",
                parallel_tool_calls=False)  # fmt: skip
    assert len(reply.logprobs) == reply.finished.completion_tokens


def test_results_go_back_to_the_model(bench_of: Callable[[str], Bench]) -> None:
    call = ToolCall("abcdefghi", "weather", '{"city": "Paris"}')
    turns = (
        *CHAT,
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "12 degrees", tool_call_id="abcdefghi"),
    )
    for family in FAMILIES:
        bench = bench_of(family)
        reply = bench.run(
            [bench.submit(turns, SamplingParams(temperature=0, max_tokens=8), tools=(WEATHER,))]
        )[0]
        assert reply.finished.completion_tokens


@pytest.mark.parametrize(
    ("request_fields", "params", "param", "says"),
    [
        ({"tools": (Tool("f", "", "{"),)}, {}, "tools", "the parameters of f: not JSON"),
        ({"tools": (Tool("f", "", "[]"),)}, {}, "tools", "the parameters of f: not a JSON schema"),
        ({"tools": (Tool("f", "", '{"type": "array"}'),)}, {}, "tools", "must be object"),
        (
            {"tools": (TIME, Tool("f", "", '{"properties": {"x": {"type": "wish"}}}'))},
            {},
            "tools",
            "the parameters of f: ",
        ),
        ({"tools": (TIME,)}, {"regex": "a"}, "tools", "only one of regex, tools"),
        ({"tools": (TIME,)}, {"ignore_eos": True}, "ignore_eos", "cannot be used with tools"),
        ({"thinking": True}, {}, "chat_template_kwargs", "leave chat_template_kwargs out"),
        ({"reasoning_effort": "low"}, {}, "reasoning_effort", "leave reasoning_effort out"),
    ],
)
def test_invalid_tool_settings_are_named(
    bench_of: Callable[[str], Bench],
    request_fields: dict[str, Any],
    params: dict[str, Any],
    param: str,
    says: str,
) -> None:
    end = ask(bench_of("described"), SamplingParams(**params), **request_fields).end
    assert isinstance(end, Failed)
    assert end.code == "invalid_request"
    assert end.param == param
    assert says in end.message
    assert "\n" not in end.message


def test_tagged_parameters_cannot_be_held_to_everything(bench_of: Callable[[str], Bench]) -> None:
    choice = Tool("f", "", '{"anyOf": [{"required": ["x"]}], "properties": {"x": {}}}')
    end = ask(bench_of("xml"), hot(1), tools=(choice,)).end
    assert isinstance(end, Failed)
    assert "do not support anyOf" in end.message
    assert ask(bench_of("hermes"), hot(1), tools=(choice,), tool_choice="none").finished
