"""Alternatives to the tokens of an answer, and forks from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from tui_chats import Tui, play, press, turns

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client import TextDelta
from localgen.client.request_body import GenerationRequest, OpenAICompat
from localgen.client.responses import TokenAlternative
from localgen.server.openai.schema import ChatRequest
from localgen.tui.chat.token_screen import TokenScreen


def possible(*tokens: tuple[str, float]) -> tuple[TextDelta, object]:
    found = tuple(TokenAlternative(text, share) for text, share in tokens)
    return TextDelta(tokens[0][0], 1, alternatives=found), answer()


def test_a_fork_from_another_token(tmp_path: Path) -> None:
    scripts = (
        ("The cat sat.", answer()),
        possible(("The", 0.9), ("A", 0.1)),
        possible((" dog", 0.5), (" ca", 0.3), ("\ufffd", 0.1)),
        (" barked.", answer()),
    )

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        first = tui.opened
        await pilot.press("f11")
        await tui.until(lambda: isinstance(tui.app.screen, TokenScreen))
        await tui.until(lambda: "90.0%" in tui.screen_text())
        assert "these are 100% of the probability" in tui.screen_text()
        await pilot.press("right")
        await tui.until(lambda: "␣dog" in tui.screen_text())
        asked = tui.clients[0].record.asked[-1]
        assert asked.messages[-1] == Message("assistant", "The")
        assert (asked.params.max_tokens, asked.params.logprobs) == (1, 8)
        await pilot.press("down", "enter")
        await tui.until(lambda: "part of a character" in tui.screen_text())
        await pilot.press("up", "up", "enter")
        await tui.until(lambda: tui.opened is not first)
        await tui.wait_until_idle(pilot)
        assert [turn.answer for turn in turns(tui)] == ["The dog barked."]
        assert [turn.answer for turn in first.chat.conversation.turns] == ["The cat sat."]
        assert tui.store.read(tui.opened.id).conversation.turns[0].answer == "The dog barked."

    play(Tui(tmp_path, *scripts), scene)


def test_home_and_end_go_to_the_ends_of_the_answer(tmp_path: Path) -> None:
    scripts = (
        ("The cat sat.", answer()),
        possible(("The", 0.9)),
        possible((" sat", 0.8)),
        possible(("The", 0.9)),
    )

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        await pilot.press("f11")
        for key, place in (("f11", "1 of 3"), ("end", "3 of 3"), ("home", "1 of 3")):
            await pilot.press(key)
            await tui.until(lambda place=place: place in tui.screen_text())  # type: ignore[misc]

    play(Tui(tmp_path, *scripts), scene)


def test_an_answer_that_would_end_and_one_that_cannot_be_looked_at(tmp_path: Path) -> None:
    scripts = (
        ("one two", answer()),
        (answer(),),
        (InvalidRequest("answers begin with reasoning"),),
    )

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "f11")
        assert "ask something first" in tui.screen_text()
        await tui.ask(pilot, "q")
        await pilot.press("f11")
        await tui.until(lambda: "the model would end the answer here" in tui.screen_text())
        await pilot.press("right")
        await tui.until(lambda: "answers begin with reasoning" in tui.screen_text())
        await pilot.press("escape")
        await tui.until(lambda: tui.main.is_active)
        assert len(tui.manager.summaries) == 1

    play(Tui(tmp_path, *scripts), scene)


def chat_body(*messages: Message) -> dict[str, object]:
    request = GenerationRequest(None, messages, SamplingParams())
    return dict(json.loads(request.body(None, OpenAICompat(is_local=True))))


def test_an_answer_is_continued_over_the_protocol() -> None:
    asked = Message("user", "q")
    assert "continue_final_message" not in chat_body(asked)
    body = chat_body(asked, Message("assistant", "The"))
    wanted = ChatRequest.model_validate(body).to_request_fields()
    assert wanted["prefill"] == "The"
    assert wanted["messages"] == (asked,)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"continue_final_message": True}, "needs an assistant message"),
        ({"add_generation_prompt": False}, "needs continue_final_message: true"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_wrong_continuations_are_refused(fields: dict[str, bool], says: str) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], **fields}
    with pytest.raises(InvalidRequest, match=says):
        ChatRequest.model_validate(body).to_request_fields()
