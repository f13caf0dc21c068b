"""A thinking budget ends the reasoning after as many tokens, and the answer goes on."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from drafting import always_draft
from fake_runner import END, VOCAB, FakeRunner, next_token
from models import Bench, LoadedBench, Reply
from test_cuda_runner import CudaBench
from test_engine import until_prepared
from test_engine_drafts import Oracle
from tool_templates import FAMILIES

from localgen.backends.engine.engine import Engine
from localgen.backends.engine.input_processor import NO_REASONING_NOTE, InputProcessor
from localgen.backends.engine.scheduler import Scheduler, SequenceOutput
from localgen.backends.engine.thinking_budgets import LAST_WORDS
from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.reasoning import ReasoningParser, detect_thinking_tags
from localgen.backends.text.template import ChatTemplate
from localgen.backends.types import Finished, Message, Request, StepEvents, Tool
from localgen.server.openai.schema import ChatRequest
from localgen.server.responses_api.schema import ResponsesRequest

CHAT = (Message("user", "What is the weather in Paris?"),)
CLOSE = "</think>"
TAGS = detect_thinking_tags("<think>")


class CharacterTokenizer:
    """A token is a character from space to the last one of ASCII, which stands for a newline."""

    vocab_size = VOCAB
    eos_token_ids = frozenset({END})
    bos = eos = ""
    infill_tokens = None

    def encode(self, text: str) -> list[int]:
        return [95 if letter == "\n" else ord(letter) - 32 for letter in text]

    encode_for_embedding = encode

    def piece(self, token: int) -> bytes:
        return b"\n" if token == 95 else bytes([(token + 32) % 128])


class Log:
    """The reasoning, the text and the end of each request."""

    def __init__(self) -> None:
        self.reasoning: dict[str, str] = defaultdict(str)
        self.text: dict[str, str] = defaultdict(str)
        self.ends: dict[str, Finished] = {}

    def __call__(self, events: StepEvents) -> None:
        for delta in events.deltas:
            self.reasoning[delta.request_id] += delta.reasoning
            self.text[delta.request_id] += delta.text
        assert not events.failed
        self.ends |= {end.request_id: end for end in events.finished}


def engine_of(runner: FakeRunner, log: Log, opening: str, *drafters: Oracle) -> Engine:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}" + opening)
    intake = InputProcessor(
        limits=runner.limits,
        tokenizer=CharacterTokenizer(),
        template=template,
        defaults=SamplingParams(),
    )
    return Engine(runner, intake, itl_target_ms=1e9, max_queue=100, publish=log, drafters=drafters)


def submit(engine: Engine, name: str, prompt: str, **params: Any) -> None:
    given = SamplingParams(ignore_eos=True, **params)
    engine.submit(
        Request(
            id=name,
            messages=(Message("user", prompt),),
            params=given,
            arrived_s=time.monotonic(),
            priority=len(name),
        )
    )


def run_until_ended(engine: Engine, log: Log, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while len(log.ends) < count:
        assert time.monotonic() < deadline_s, "not all requests have ended"
        engine.step(wait=False)


def expected(prompt: str, budget: int, limit: int) -> tuple[str, str]:
    """The reasoning and the text of the answer when it runs alone: `limit` tokens."""
    tokenizer = CharacterTokenizer()
    known = tokenizer.encode(prompt)
    tokens = list(known)
    parser = ReasoningParser(TAGS, is_open=True) if TAGS else None
    assert parser is not None
    for _ in range(min(budget, limit)):
        tokens.append(next_token(tokens))
    thoughts, _ = parser.feed(b"".join(map(tokenizer.piece, tokens[len(known) :])).decode())
    forced = tokenizer.encode((LAST_WORDS if thoughts else "") + CLOSE)
    if budget + len(forced) < limit:  # else there is no room for an answer
        tokens += forced
    while len(tokens) < len(known) + limit:
        tokens.append(next_token(tokens))
    rest = tokens[len(known) + min(budget, limit) :]
    thought, text = parser.feed(b"".join(map(tokenizer.piece, rest)).decode())
    last = parser.finish()
    return thoughts + thought + last[0], text + last[1]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_same_answers(
    seed: int, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if drafts:
        always_draft(monkeypatch)
    dice, log, runner = random.Random(seed), Log(), FakeRunner(kv_tokens=320, batch=32)
    engine = engine_of(runner, log, "<think>", *([Oracle(seed)] if drafts else []))
    asked = {}
    for number in range(12):
        prompt = "".join(dice.choices("ABCDEFGH", k=dice.randint(1, 60)))
        budget, limit = dice.choice([0, 1, dice.randint(2, 40)]), dice.randint(1, 90)
        asked[f"{number}"] = (prompt, budget, limit)
        submit(engine, f"{number}", prompt, thinking_budget=budget, max_tokens=limit)
        until_prepared(engine)
        for _ in range(dice.randint(0, 12)):
            engine.step(wait=False)
            if dice.random() < 0.1:
                engine._scheduler.preempt_one()
    run_until_ended(engine, log, len(asked))
    for name, (prompt, budget, limit) in asked.items():
        found = (log.reasoning[name], log.text[name])
        assert found == expected(prompt + "<think>", budget, limit), (name, budget, limit)
        assert log.ends[name].completion_tokens == limit
        assert log.ends[name].timings.ttft_ms > 0
    assert engine._scheduler.counters.preemptions > 0
    assert not engine._thinking_budgets
    runner.check()


def test_reasoning_that_the_model_opens_is_counted_from_there() -> None:
    log, runner = Log(), FakeRunner()
    engine = engine_of(runner, log, "{# <think> #}")
    opening = CharacterTokenizer().encode("<think>")
    answers = iter([*opening, *CharacterTokenizer().encode("abcdefghijk")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fake_runner.next_token", lambda _tokens: next(answers, 1))
        submit(engine, "a", "x", thinking_budget=4, max_tokens=60)
        run_until_ended(engine, log, 1)
    assert log.reasoning["a"] == f"abcd{LAST_WORDS.rstrip()}"
    assert log.text["a"].startswith("efghijk!!")


def test_an_answer_without_reasoning_is_not_cut() -> None:
    log, runner = Log(), FakeRunner()
    engine = engine_of(runner, log, "{# <think> #}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fake_runner.next_token", lambda _tokens: 40)
        submit(engine, "a", "x", thinking_budget=1, max_tokens=30)
        run_until_ended(engine, log, 1)
    assert (log.reasoning["a"], log.text["a"]) == ("", "H" * 30)


def test_answer_now_ends_the_reasoning_in_the_next_step() -> None:
    log, runner = Log(), FakeRunner(kv_tokens=1024)
    engine = engine_of(runner, log, "<think>")
    submit(engine, "a", "x", max_tokens=200)
    submit(engine, "b", "y", max_tokens=200)
    until_prepared(engine)
    for _ in range(20):
        engine.step(wait=False)
    seq = engine._scheduler.get("a")
    assert seq is not None
    count = seq.num_generated
    engine.answer_now("a")
    engine.answer_now("nobody")
    run_until_ended(engine, log, 2)
    assert (log.reasoning["a"], log.text["a"]) == expected("x<think>", count, 200)
    assert any(f"after {count} tokens" in note for note in log.ends["a"].notes)
    assert log.text["b"] == "", "the other one reasons on"


def test_an_end_that_is_refused_comes_with_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Scheduler.append_tokens
    refused: list[object] = []

    def refuse_once(self: Scheduler, *arguments: Any) -> SequenceOutput | None:
        if not refused:
            refused.append(arguments)
            return None
        return append(self, *arguments)

    monkeypatch.setattr(Scheduler, "append_tokens", refuse_once)
    log = Log()
    engine = engine_of(FakeRunner(), log, "<think>")
    submit(engine, "a", "x", thinking_budget=5, max_tokens=60)
    run_until_ended(engine, log, 1)
    assert (log.reasoning["a"], log.text["a"]) == expected("x<think>", 6, 60)


def test_reasoning_without_room_for_an_answer_goes_on() -> None:
    log = Log()
    engine = engine_of(FakeRunner(), log, "<think>")
    submit(engine, "a", "x", thinking_budget=5, max_tokens=20)
    run_until_ended(engine, log, 1)
    assert (log.reasoning["a"], log.text["a"]) == expected("x<think>", 20, 20)
    assert not any("was ended" in note for note in log.ends["a"].notes)


OPEN = FAMILIES["open-thinking"]
BACKENDS: dict[str, Callable[[], LoadedBench]] = {
    "llamacpp": lambda: Bench(LoadOptions(chat_template=OPEN, threads=1)),
    "cuda": lambda: CudaBench(chat_template=OPEN),
    "cuda ahead": lambda: CudaBench(as_on_gpu=True, chat_template=OPEN),
}


@pytest.fixture(scope="module", params=BACKENDS)
def bench(request: pytest.FixtureRequest) -> Iterator[LoadedBench]:
    made = BACKENDS[request.param]()
    yield made
    made.close()


def ask(bench: LoadedBench, **params: Any) -> Reply:
    more = params.pop("more", {})
    given = SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 120, **params})
    return bench.run([bench.submit(CHAT, given, **more)])[0]


@pytest.mark.parametrize("budget", [0, 1, 30])
def test_a_model_answers_after_its_budget(bench: LoadedBench, budget: int) -> None:
    free = ask(bench, min_tokens=60)
    assert free.text == "", "it would reason on"
    reply = ask(bench, thinking_budget=budget, min_tokens=60)
    assert reply.text
    words = LAST_WORDS.rstrip()
    assert reply.reasoning == "" or reply.reasoning.endswith(words)
    assert free.reasoning.startswith(reply.reasoning.removesuffix(words))
    assert reply.finished.notes == (f"the reasoning was ended after {budget} tokens",)
    again = ask(bench, thinking_budget=budget, min_tokens=60)
    assert (again.reasoning, bool(again.text)) == (reply.reasoning, True)
    assert again.finished.timings.cache_n > 0, "the same from the prefix cache"
    assert again.finished.timings.ttft_ms > 0


def test_a_grammar_applies_after_the_end(bench: LoadedBench) -> None:
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    reply = ask(bench, thinking_budget=9, json_schema=schema)
    assert reply.text.replace(" ", "").replace("\n", "") in ('{"a":1}', '{"a":2}')
    assert reply.finished.reason == "stop"


def test_logprobs_are_those_of_the_sampled_tokens(bench: LoadedBench) -> None:
    reply = ask(bench, thinking_budget=9, logprobs=1, max_tokens=50, min_tokens=40)
    tokenizer = bench.model.tokenizer
    forced = len(tokenizer.encode(LAST_WORDS + CLOSE)) - len(tokenizer.encode(""))
    assert len(reply.tokens) + forced == reply.finished.completion_tokens


def test_calls_come_after_the_end() -> None:
    bench = Bench(LoadOptions(chat_template=FAMILIES["thinking"] + "<think>\n", threads=1))
    more = {"tools": (Tool("time"),), "tool_choice": "required", "parallel_tool_calls": False}
    reply = ask(bench, thinking_budget=7, more=more)
    assert reply.whole_calls[0][0] == "time"
    assert reply.finished.reason == "tool_calls"
    assert reply.reasoning.endswith(LAST_WORDS.rstrip())
    bench.close()


def test_a_model_that_does_not_reason_says_so() -> None:
    bench = Bench(LoadOptions(threads=1))
    assert ask(bench, thinking_budget=7, max_tokens=5).finished.notes == (NO_REASONING_NOTE,)
    off = ask(bench, thinking_budget=7, max_tokens=5, more={"thinking": False})
    assert off.finished.notes == ()
    bench.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 7},
        {"thinking_budget_tokens": 7, "reasoning_budget_tokens": 7},
        {"thinking_token_budget": 7},
        {"reasoning": {"max_tokens": 7}},
        {"reasoning": {"max_tokens": 7, "enabled": True, "exclude": False}},
    ],
)
def test_the_names_of_other_servers(fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    assert ChatRequest.model_validate(body).to_sampling_params().thinking_budget == 7
    unlimited = {name: -1 for name in fields if name != "reasoning"}
    params = ChatRequest.model_validate(body | unlimited).to_sampling_params()
    assert params.thinking_budget == (None if unlimited else 7)


def test_two_budgets_are_refused() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "thinking_budget": 5}
    two = ChatRequest.model_validate(body | {"reasoning": {"max_tokens": 7}})
    with pytest.raises(InvalidRequest, match="5 and 7 tokens: give one"):
        two.to_sampling_params()


def test_the_effort_may_be_nested() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for fields, thinking, effort in (
        ({"reasoning": {"effort": "low"}}, None, "low"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, None, "low"),
        ({"reasoning": {"enabled": False}}, False, None),
    ):
        found = ChatRequest.model_validate(body | fields).to_request_fields()
        assert (found["thinking"], found["reasoning_effort"]) == (thinking, effort)
    both = ChatRequest.model_validate(
        body | {"reasoning": {"effort": "low"}, "reasoning_effort": "high"}
    )
    with pytest.raises(InvalidRequest, match="not both"):
        both.to_request_fields()


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {"enabled": False}, "reasoning_effort": "high"},
        {"reasoning": {"enabled": True, "effort": "none"}},
        {"reasoning": {"enabled": False}, "chat_template_kwargs": {"enable_thinking": True}},
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    with pytest.raises(InvalidRequest, match="give "):
        ChatRequest.model_validate(body).to_request_fields()


def test_the_responses_api_has_it_too() -> None:
    request = ResponsesRequest.model_validate({"input": "hi", "reasoning": {"max_tokens": 7}})
    assert request.to_sampling_params().thinking_budget == 7
    assert request.echo_fields()["reasoning"] == {"max_tokens": 7}
