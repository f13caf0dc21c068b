"""Where prompts part: found for changes near the head, not for continued chats and edits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localgen.backends.engine.prefix_breaks import MAX_PROMPTS, RecentPrompts
from localgen.backends.prefix_break import PrefixBreak
from localgen.backends.types import Message, Request, Tool

BODY = "\n".join(f"Rule {number}: keep item {number * 7919 % 1013}." for number in range(200))
TOOLS = (Tool("read"), Tool("write"))


def compare(prompts: RecentPrompts, request: Request) -> PrefixBreak | None:
    """Compare a prompt whose template writes role and content, one token per character."""
    tools = "".join(f"[{tool.name}] {BODY}\n" for tool in request.tools)
    text = request.prompt or "".join(
        f"<{each.role}>{each.content}\n{tools if each.role == 'system' else ''}"
        for each in request.messages or ()
    )
    return prompts.compare(request, text, [ord(char) for char in text])


def chat(system: str, *turns: str, **fields: Any) -> Request:
    roles = ("user", "assistant") * len(turns)
    talk = (Message(role, text) for role, text in zip(roles, turns, strict=False))
    return replace(Request(id="r", messages=(Message("system", system), *talk)), **fields)


def test_a_changed_header_is_named() -> None:
    prompts = RecentPrompts()
    assert compare(prompts, chat(f"cch=9f1; é ok\n{BODY}", "hi", BODY, "go")) is None
    found = compare(prompts, chat(f"cch=a10; é ok\n{BODY}", "hi", BODY, "go", "ok", "on"))
    assert found is not None
    assert (found.place, found.byte) == ("the system message", 4)
    assert (found.before, found.after) == ("<system>cch=9f1;", "<system>cch=a10;")
    assert 2 * len(BODY) * 0.9 < found.tokens < 2 * len(BODY) + 100


def test_a_change_of_the_tools_is_named() -> None:
    prompts = RecentPrompts()
    compare(prompts, chat("be kind", "hi", BODY, "go", tools=TOOLS))
    found = compare(prompts, chat("be kind", "hi", BODY, "go", tools=TOOLS[::-1]))
    assert found is not None
    assert found.place == "the tools"


def test_a_byte_of_a_plain_prompt_is_named() -> None:
    prompts = RecentPrompts()
    compare(prompts, Request(id="a", prompt=f"é 1\t{BODY}"))
    found = compare(prompts, Request(id="b", prompt=f"é 2\t{BODY}"))
    assert found is not None
    assert (found.place, found.byte, found.before, found.after) == ("the prompt", 3, "1", "2")


@pytest.mark.parametrize(
    "later",
    [
        chat(BODY, "hi", BODY, "go"),
        chat(BODY, "hi", BODY, "go", "done", "and now?"),
        chat(BODY, "hi", BODY, "stop: " + BODY),
        chat(BODY, "another question"),
        chat("x" + BODY, "hi", BODY, "go", account="other"),
        chat("x" + BODY, "hi", BODY, "go", cache_salt="other"),
        chat("something else entirely", "hi"),
    ],
)
def test_what_is_not_reported(later: Request) -> None:
    prompts = RecentPrompts()
    compare(prompts, chat(BODY, "hi", BODY, "go"))
    assert compare(prompts, later) is None


def test_old_prompts_are_forgotten() -> None:
    prompts = RecentPrompts()
    compare(prompts, chat("1" + BODY, "hi", BODY, "go"))
    for number in range(MAX_PROMPTS):
        compare(prompts, chat(f"{number}", "hi", account="other"))
    assert compare(prompts, chat("2" + BODY, "hi", BODY, "go")) is None


def test_an_evicted_prefix_is_not_reported() -> None:
    found = PrefixBreak(place="the tools", byte=2, before="a", after="b", token=500, tokens=4000)
    assert found.measured(cached=0, computed=6000, prompt_ms=60_000) is None
    assert found.measured(cached=496, computed=100, prompt_ms=1000) is None
    measured = found.measured(cached=496, computed=5504, prompt_ms=55_040)
    assert str(measured) == (
        "parts at byte 2 of the tools: `a` became `b`; 4,000 tokens read again, 40 s"
    )


@pytest.mark.parametrize(
    ("token", "cached", "is_reported"),
    [(3, 0, False), (3, 3, True), (31, 0, False), (31, 15, False), (31, 16, True), (16, 16, True)],
)
def test_an_evicted_prefix_of_a_few_tokens(token: int, cached: int, is_reported: bool) -> None:
    found = PrefixBreak(place="the tools", byte=2, before="a", after="b", token=token, tokens=4000)
    measured = found.measured(cached=cached, computed=6000, prompt_ms=60_000)
    assert (measured is not None) is is_reported
