"""Where prompts part: found for changes near the head, not for continued chats and edits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from models import Bench, LoadedBench

from localgen.backends.engine.prefix_breaks import MAX_PROMPTS, RecentPrompts
from localgen.backends.model_info import LoadOptions
from localgen.backends.prefix_break import PrefixBreak
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, Request, Tool

BODY = "\n".join(f"Rule {number}: keep item {number * 7919 % 1013}." for number in range(200))
CTX, KV_TOKENS = 2048, 8192
KV: dict[str, Any] = {"parallel": 2, "ctx": CTX, "kv_tokens": KV_TOKENS}
TOOLS = (Tool("read"), Tool("write"))


def compare(prompts: RecentPrompts, request: Request) -> PrefixBreak | None:
    """Compare a prompt whose template writes role and content, one token per character."""
    tools = "".join(f"[{tool.name}] {BODY}\n" for tool in request.tools)
    text = request.prompt or "".join(
        f"<{each.role}>{each.content}\n{tools if each.role == 'system' else ''}"
        for each in request.messages or ()
    )
    found = prompts.compare(request, text, [ord(char) for char in text])
    return found.place if found else None


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
    assert found.measured(held=0, computed=6000, prompt_ms=60_000) is None
    assert found.measured(held=6000, computed=100, prompt_ms=1000) is None
    measured = found.measured(held=6000, computed=5504, prompt_ms=55_040)
    assert str(measured) == (
        "parts at byte 2 of the tools: `a` became `b`; 4,000 tokens read again, 40 s"
    )


@pytest.mark.parametrize(
    ("token", "held", "lost"),
    [(0, 0, None), (3, 258, None), (3, 259, 256), (31, 1040, 1009), (16, 9000, 4000)],
)
def test_only_what_was_still_cached_is_lost(token: int, held: int, lost: int | None) -> None:
    found = PrefixBreak(place="the tools", byte=2, before="a", after="b", token=token, tokens=4000)
    measured = found.measured(held=held, computed=6000, prompt_ms=60_000)
    assert (measured.tokens if measured else None) == lost


def cuda_bench() -> LoadedBench:
    pytest.importorskip("torch")
    from test_cuda_runner import CudaBench

    return CudaBench(**KV)


@pytest.fixture(scope="module", params=["llamacpp", "cuda"])
def bench(request: pytest.FixtureRequest) -> Iterator[LoadedBench]:
    loaded = Bench(LoadOptions(**KV)) if request.param == "llamacpp" else cuda_bench()
    yield loaded
    loaded.close()


def break_of(bench: LoadedBench, prompt: str, **fields: Any) -> PrefixBreak | None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (reply,) = bench.run([bench.submit([], params, messages=None, prompt=prompt, **fields)])
    return reply.finished.timings.prefix_break


def test_a_break_in_the_first_token_is_named(bench: LoadedBench) -> None:
    """Nothing of the prompt is in the cache, and what is lost is."""
    rules = BODY[:2000]
    assert break_of(bench, f"1 is the number.\n{rules}") is None
    found = break_of(bench, f"2 is the number.\n{rules}")
    assert found is not None
    assert (found.place, found.byte, found.before, found.after) == ("the prompt", 0, "1", "2")
    assert found.token < 2
    assert found.tokens > 500
    assert break_of(bench, "3 Of something else. " * 40) is None
    assert break_of(bench, f"4 is the number.\n{rules}", cache_salt="other") is None


def test_an_earlier_prompt_that_was_evicted(bench: LoadedBench) -> None:
    """Nothing is lost by the break of a prompt whose earlier one had to leave the cache."""
    rules = BODY[3000:5000]
    assert break_of(bench, f"5 is the number.\n{rules}") is None
    for number in range(2 * KV_TOKENS // CTX):
        words = " ".join(str(1000 * number + word) for word in range(CTX // 6))
        assert break_of(bench, words, account="other") is None
    assert break_of(bench, f"6 is the number.\n{rules}") is None
    assert break_of(bench, f"7 is the number.\n{rules}") is not None
