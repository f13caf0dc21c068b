"""Chats that exceed the context: refused, or without their oldest turns, which is said."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_server import real_server

from localgen.backends.engine.overflow import answer_room, drop_oldest
from localgen.backends.types import Message, ToolCall

SYSTEM = Message("system", "s")


def num_chars(messages: tuple[Message, ...]) -> int:
    return sum(len(each.content) for each in messages)


def count_with(chars_per_token: float, ctx: int) -> Callable[[tuple[Message, ...]], int | None]:
    """Counts tokens of so many characters each, and none beyond the context."""

    def count_tokens(messages: tuple[Message, ...]) -> int | None:
        num_tokens = math.ceil(num_chars(messages) / chars_per_token)
        return num_tokens if num_tokens <= ctx else None

    return count_tokens


def conversation(*lengths: int) -> tuple[Message, ...]:
    """Turns of a user's message and an answer of this length, and a new prompt."""
    turns = [
        message
        for length in lengths
        for message in (Message("user", "u"), Message("assistant", "a" * length))
    ]
    return (SYSTEM, *turns, Message("user", "last"))


@given(lengths=st.lists(st.integers(1, 200), max_size=30), ctx=st.integers(8, 200))
def test_what_stays_fits_and_is_the_end_of_the_conversation(lengths: list[int], ctx: int) -> None:
    whole = conversation(*lengths)

    def fits(messages: tuple[Message, ...]) -> bool:
        return num_chars(messages) <= 4 * ctx

    kept = drop_oldest(whole, ctx, count_with(4.0, ctx))
    assert kept.messages[0] == SYSTEM
    rest = kept.messages[1:]
    assert rest == whole[len(whole) - len(rest) :]
    assert rest[0].role == "user"
    assert kept.num_left_out == len(whole) - len(kept.messages)
    assert fits(kept.messages) or len(rest) == 1
    assert not (fits(whole) and kept.num_left_out)


def test_the_next_turns_begin_with_the_same_messages() -> None:
    ctx, firsts = 400, []
    for count in range(40, 80):
        whole = conversation(*[40] * count)
        kept = drop_oldest(whole, ctx, count_with(4.0, ctx))
        firsts.append(kept.num_left_out)
    # 4 * 400 / 4 characters in a unit, 41 in a turn: about every tenth turn
    assert len(set(firsts)) <= 6


@pytest.mark.parametrize("chars_per_token", [0.4, 1.0, 1.6, 4.0, 6.5])
def test_what_more_is_left_out_is_about_a_quarter_of_the_context(chars_per_token: float) -> None:
    ctx, turn_chars = 4000, 41
    for count in range(600, 660):
        whole = conversation(*[turn_chars - 1] * count)
        kept = drop_oldest(whole, ctx, count_with(chars_per_token, ctx))
        unused = ctx - num_chars(kept.messages) / chars_per_token
        assert 0 <= unused <= ctx / 4 * 2**0.5 + 2 * turn_chars / chars_per_token


def test_tool_calls_keep_their_results() -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),))
    result = Message("tool", "r" * 50, tool_call_id="1")
    whole = (
        *(SYSTEM, Message("system", "t")),
        *(Message("user", "one"), call, result, Message("assistant", "1")),
        *(Message("user", "two"), call, result),
    )
    kept = drop_oldest(whole, 40, count_with(2.0, 39))
    assert kept.messages == (*whole[:2], *whole[6:])
    assert kept.num_left_out == 4


@pytest.mark.parametrize(
    ("ctx", "max_tokens", "room"), [(400, None, 100), (400, 30, 30), (400, 900, 100), (2, 0, 1)]
)
def test_the_answer_gets_a_quarter_of_the_context(
    ctx: int, max_tokens: int | None, room: int
) -> None:
    assert answer_room(ctx, max_tokens) == room


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with real_server("tiny", "--ctx", "256", LOCALGEN_KEEP_ALIVE="-1") as running:
        yield running.url


def ask(url: str, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    turns = [
        {"role": role, "content": f"{role} {number} " * 8}
        for number in range(12)
        for role in ("user", "assistant")
    ]
    system = {"role": "system", "content": "Be brief."}
    messages = [system, *turns, {"role": "user", "content": "hello"}]
    name = "input" if path == "/v1/responses" else "messages"
    return httpx.post(f"{url}{path}", json={name: messages, **fields}, timeout=60).json()


def test_an_error_is_the_default(url: str) -> None:
    refused = ask(url, max_tokens=3)["error"]
    assert refused["code"] == "context_length_exceeded"
    assert ask(url, max_tokens=3, on_overflow="error")["error"] == refused
    assert "on_overflow" in ask(url, on_overflow="drop")["error"]["message"]


def test_the_oldest_are_left_out_and_counted(url: str) -> None:
    answered = ask(url, on_overflow="drop-oldest", max_tokens=3)
    (note,) = answered["localgen"]["notes"]
    found = re.fullmatch(
        r"the oldest (\d+) of 26 messages were left out to fit the context of 256 tokens", note
    )
    assert found is not None, note
    assert 0 < int(found[1]) < 25
    assert answered["usage"]["prompt_tokens"] <= 256 - 3
    long = ask(url, on_overflow="drop-oldest")
    assert long["usage"]["prompt_tokens"] <= 192
    short = ask(url, on_overflow="drop-oldest", max_tokens=3, ctx=30)["localgen"]["notes"]
    assert short == ["the oldest 24 of 26 messages were left out to fit the context of 30 tokens"]


def test_texts_with_other_characters_per_token(url: str) -> None:
    """The unit is of tokens: these have a third of a character each, English has about four."""
    turns = [
        {"role": role, "content": "一二三"} for _ in range(60) for role in ("user", "assistant")
    ]
    messages = [*turns, {"role": "user", "content": "四"}]
    fields = {"messages": messages, "on_overflow": "drop-oldest", "max_tokens": 3}
    answered = httpx.post(f"{url}/v1/chat/completions", json=fields, timeout=60).json()
    turn_tokens = 2 * 256 // 12
    assert answered["usage"]["prompt_tokens"] > 256 * (1 - 2**0.5 / 4) - 3 - turn_tokens


def test_a_last_turn_that_does_not_fit_is_refused(url: str) -> None:
    refused = ask(url, on_overflow="drop-oldest", ctx=8)["error"]
    assert refused["code"] == "context_length_exceeded"


def test_truncation_of_the_responses_api(url: str) -> None:
    refused = ask(url, "/v1/responses", max_output_tokens=3)
    assert refused["error"]["code"] == "context_length_exceeded"
    answered = ask(url, "/v1/responses", max_output_tokens=3, truncation="auto")
    assert answered["truncation"] == "auto"
    assert answered["usage"]["input_tokens"] <= 253
