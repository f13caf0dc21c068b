"""OpenAI's own client requests several answers from the real server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import openai
import pytest
from real_server import real_server

STORY = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with real_server() as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **fields: object) -> list[str]:
    reply = client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=STORY, temperature=1.5, max_tokens=20, **fields
    )
    assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
    return [choice.message.content or "" for choice in reply.choices]


def test_the_same_seed_gives_the_same_texts(client: openai.OpenAI) -> None:
    first = chat(client, n=4, seed=11)
    assert len(set(first)) == 4
    assert first == chat(client, n=4, seed=11)
    # each equals the answer of a single request
    assert first == [chat(client, seed=11 + index)[0] for index in range(4)]


def test_without_a_seed_each_draws_its_own(client: openai.OpenAI) -> None:
    assert len(set(chat(client, n=4))) > 1


def test_a_prompt_is_computed_and_counted_once(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "A prompt of its own. " * 20}],
        n=4,
        max_tokens=5,
    )
    alone = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "A prompt of its own. " * 20}],
        max_tokens=5,
    )
    assert reply.usage is not None
    assert alone.usage is not None
    assert reply.usage.prompt_tokens == alone.usage.prompt_tokens > 100
    computed = reply.model_extra["timings"]["prompt_n"] if reply.model_extra else 0
    assert computed < 2 * reply.usage.prompt_tokens


def test_a_stream_has_all_of_them(client: openai.OpenAI) -> None:
    whole = chat(client, n=3, seed=5)
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Tell me a story."}],
        temperature=1.5,
        max_tokens=20,
        n=3,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, str | None] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert [texts[index] for index in range(3)] == whole
    assert sorted(ends) == [0, 1, 2]
    assert usage is not None
    assert usage.completion_tokens > 3


def test_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The capital of France"]
    reply = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=8, temperature=0
    )
    texts = [choice.text for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    alone = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
        for prompt in prompts
    ]
    assert texts == [alone[0].choices[0].text] * 2 + [alone[1].choices[0].text] * 2
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)
    ids = client.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=2)
    assert len(ids.choices) == 2
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


@pytest.mark.parametrize(("n", "says"), [(0, "must be at least 1"), (17, "16")])
def test_too_many_answers_are_rejected(client: openai.OpenAI, n: int, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        chat(client, n=n)
    assert refused.value.param == "n"
