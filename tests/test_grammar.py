"""Answers that are constrained by a grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from models import Bench, questions

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.sandbox import Sandbox
from localgen.backends.text.grammar import GrammarCompiler
from localgen.backends.text.grammar_check import invalid_grammar
from localgen.backends.types import Failed, Message

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT = (Message("user", "Tell me of a friend."),)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(LoadOptions())
    yield bench
    bench.close()


def hot(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 400, "seed": seed, **more})


def ask(bench: Bench, *params: SamplingParams) -> list[str]:
    """Answers that ended by an end token."""
    replies = bench.run([bench.submit(CHAT, each) for each in params])
    assert {reply.finished.reason for reply in replies} == {"stop"}
    return [reply.text for reply in replies]


def test_schema_holds_at_temperature_1(bench: Bench) -> None:
    schema = json.dumps(PERSON)
    for text in ask(bench, *(hot(seed, json_schema=schema) for seed in range(20))):
        person = json.loads(text)
        assert {"name", "age"} <= person.keys() <= {"name", "age", "friends"}
        assert isinstance(person["name"], str)
        assert len(person["name"]) <= 12
        assert isinstance(person["age"], int)
        assert 0 <= person["age"] <= 150
        assert len(person.get("friends", [])) <= 3


def random_schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema with bounded values."""
    kinds = ["integer", "boolean", "string", "enum", "null"]
    kind = dice.choice(kinds if depth > 1 else [*kinds, "object", "array", "object"])
    match kind:
        case "enum":
            return {"enum": dice.sample(["a", "b c", 3, None, "é", True], 3)}
        case "string":
            return {"type": "string", "maxLength": dice.randint(1, 10)}
        case "array":
            items = random_schema(dice, depth + 1)
            return {"type": "array", "items": items, "maxItems": dice.randint(1, 3)}
        case "object":
            names = dice.sample(["x", "naïve", "long name", "n", "k0"], dice.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(dice, depth + 1) for name in names},
                "required": names[: dice.randint(0, len(names))],
                "additionalProperties": False,
            }
        case "integer":
            return {"type": "integer", "minimum": -99, "maximum": 999}
    return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits one of the schemas above."""
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= value.keys() <= known.keys()
                and all(fits(item, known[name]) for name, item in value.items())
            )
        case "array":
            return (
                isinstance(value, list)
                and len(value) <= schema["maxItems"]
                and all(fits(item, schema["items"]) for item in value)
            )
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and -99 <= value <= 999
        case "boolean":
            return isinstance(value, bool)
    return value is None


def test_random_schemas_hold(bench: Bench) -> None:
    dice = random.Random(5)
    schemas = [random_schema(dice) for _ in range(200)]
    chats = questions(20)
    names = [
        bench.submit(chats[i % 20], hot(i, json_schema=json.dumps(schema)))
        for i, schema in enumerate(schemas)
    ]
    replies = bench.run(names)
    for reply, schema in zip(replies, schemas, strict=True):
        assert reply.finished.reason == "stop"
        assert fits(json.loads(reply.text), schema), (reply.text, schema)


def test_answers_match_the_regular_expression(bench: Bench) -> None:
    for text in ask(bench, *(hot(seed, regex=r"[a-f]{3}-\d{2,4}") for seed in range(10))):
        assert re.fullmatch(r"[a-f]{3}-\d{2,4}", text)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= ("yes" | "no") "!"', 'start: ("yes" | "no") "!"'],
    ids=["gbnf", "lark"],
)
def test_answers_match_the_grammar(bench: Bench, grammar: str) -> None:
    assert set(ask(bench, *(hot(seed, grammar=grammar) for seed in range(10)))) <= {"yes!", "no!"}


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "<" ([ab]+)? ">"', "<[ab]*>"),
        ('root ::= "<" ([ab]{2,3} "-"?)+ ">"', "<([ab]{2,3}-?)+>"),
        ('root ::= "<" ([ab]?){2,4} ">"', "<[ab]{0,4}>"),
    ],
)
def test_answers_match_repeated_repetitions_of_gbnf(
    bench: Bench, grammar: str, pattern: str
) -> None:
    settings = (hot(seed, grammar=grammar, max_tokens=200) for seed in range(5))
    for reply in bench.run([bench.submit(CHAT, each) for each in settings]):
        finished = reply.finished.reason == "stop"
        assert re.fullmatch(pattern if finished else "<[ab-]*", reply.text), reply.text


def test_greedy_takes_the_most_probable_allowed_token(bench: Bench) -> None:
    free = SamplingParams(temperature=0, max_tokens=20, logprobs=20)
    (plain,) = bench.run([bench.submit(CHAT, free)])
    first = plain.logprobs[0]
    banned = first.chosen.text
    pattern = f"[^{re.escape(banned[:1])}].{{0,20}}"
    held = SamplingParams(temperature=0, max_tokens=1, logprobs=20, regex=pattern)
    (reply,) = bench.run([bench.submit(CHAT, held)])
    allowed = [entry for entry in first.top if not entry.text.startswith(banned[:1])]
    assert reply.logprobs[0].chosen.token_id == allowed[0].token_id
    # the model's own probabilities, as if there was no grammar
    assert reply.logprobs[0].top[0].token_id == first.top[0].token_id
    assert reply.logprobs[0].top[0].logprob == pytest.approx(first.top[0].logprob, abs=0.01)


def test_preempted_answers_match_their_schema() -> None:
    bench = Bench(LoadOptions(ctx=200, kv_tokens=256))
    schema = json.dumps({"type": "string", "minLength": 200, "maxLength": 260})
    texts = ask(bench, *(hot(seed, json_schema=schema) for seed in range(8)))
    assert bench.stats.num_preemptions_total > 0
    assert all(200 <= len(json.loads(text)) <= 260 for text in texts)
    bench.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": '{"type": "wish"}'}, "json_schema: "),
        ({"json_schema": "[]"}, "json_schema: "),
        ({"regex": "(("}, r'^regex: invalid regex "\(\(": unclosed group$'),
        ({"regex": "a{3,1}"}, "^regex: .*: invalid repetition count range, the start must be <="),
        ({"grammar": "start: /(a/"}, r'^grammar: at 1\(8\): invalid regex "\(a": unclosed group '),
        ({"grammar": "root ::= other"}, "grammar: "),
        ({"grammar": "???"}, "grammar: "),
        ({"grammar": "root ::= "}, "grammar: it allows an empty answer only"),
        ({"regex": ""}, "regex: it allows an empty answer only"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "give only one of regex, grammar"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos cannot be used with regex"),
        ({"regex": "a" * (1 << 20) + "b"}, "1,048,576 characters"),
    ],
)
def test_invalid_grammars_are_rejected(
    bench: Bench, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        GrammarCompiler(bench.model.tokenizer).compile(SamplingParams(**settings))
    name = bench.submit(CHAT, SamplingParams(**settings))
    while bench.replies[name].end is None:
        bench.engine.step(wait=True)
    end = bench.replies[name].end
    assert isinstance(end, Failed)
    assert end.code == "invalid_request"
    assert "\n" not in end.message


def test_masks_ahead_of_drafts(bench: Bench) -> None:
    tokenizer = bench.model.tokenizer
    matcher = GrammarCompiler(tokenizer).compile(SamplingParams(regex="abc|abd"))
    assert matcher is not None
    letters = {text: tokenizer.encode(text)[-1] for text in "abcd"}
    masks = matcher.draft_masks([letters["a"], letters["d"], letters["c"]])
    assert [mask[letters["a"]] for mask in masks] == [True, False, True, True]
    assert masks[1][letters["b"]]
    assert masks[2].all(), "behind a draft that is not allowed anything goes"
    assert matcher.allowed_mask()[letters["a"]], "and the answer itself has not moved"


def properties(count: int) -> str:
    names = {f"p{number}": {"type": "string"} for number in range(count)}
    return json.dumps({"type": "object", "properties": names})


OVERLAPPING = [{"type": "string", "pattern": f"^.{{0,{most}}}a.*$"} for most in range(1, 40)]


@pytest.mark.parametrize(
    "settings",
    [
        {"grammar": "root ::= " + " | ".join(f'"w{number}"' for number in range(60_000))},
        {"json_schema": properties(16_000)},
        {"json_schema": json.dumps({"allOf": OVERLAPPING})},
    ],
    ids=["alternatives", "properties", "overlapping patterns"],
)
def test_grammars_that_take_long_to_compile_are_rejected(
    bench: Bench, settings: dict[str, Any]
) -> None:
    kind = next(iter(settings))
    name = bench.submit(CHAT, SamplingParams(**settings))
    (reply,) = bench.run([name])
    assert isinstance(reply.end, Failed)
    assert reply.end.code == "invalid_request"
    assert reply.end.message.startswith(f"{kind}: ")
    assert "\n" not in reply.end.message
    (text,) = ask(bench, hot(1, regex="[a-c]{9}"))
    assert re.fullmatch("[a-c]{9}", text)


def test_a_valid_grammar_is_checked_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox()
    compiler = GrammarCompiler(bench.model.tokenizer, sandbox)
    calls = []
    call = Sandbox.call

    def count(self: Sandbox, recipe: Any, request: Any) -> Any:
        calls.append(request.method)
        return call(self, recipe, request)

    monkeypatch.setattr(Sandbox, "call", count)
    for _ in range(3):
        assert compiler.compile(SamplingParams(json_schema=properties(10)))
    assert calls.count("validate") == 1
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            compiler.compile(SamplingParams(json_schema='{"type": "wish"}'))
    assert calls.count("validate") == 3


def test_a_panic_of_the_library_is_an_error_of_the_request() -> None:
    error = invalid_grammar("json_schema", "panic: assertion failed:\n at x.rs")
    assert error.message == (
        "json_schema: it is too large or not supported: simplify it "
        "(panic: assertion failed: at x.rs)"
    )
