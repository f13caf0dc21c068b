"""OpenAI's own client requests a prompt with its logprobs, as evaluation harnesses do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import openai
import pytest
from real_server import real_server

PROMPT = "What is 17 + 25? The answer is 42."


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with real_server() as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    wanted: dict[str, Any] = {"prompt": PROMPT, "echo": True, "temperature": 0, "max_tokens": 6}
    return client.completions.create(model="tiny", **(wanted | fields))


def test_logprobs_cover_prompt_and_answer(client: openai.OpenAI) -> None:
    reply = complete(client, logprobs=2)
    (choice,) = reply.choices
    answer = complete(client, echo=False, logprobs=2).choices[0]
    assert choice.text == PROMPT + answer.text
    found = choice.logprobs
    count = reply.usage.total_tokens
    assert reply.usage.completion_tokens == 6
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [0, *accumulate(map(len, found.tokens[:-1]))]
    assert [len(each) for each in (found.tokens, found.token_logprobs, found.top_logprobs)] == (
        [count] * 3
    )
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    for token, logprob, top in zip(
        found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True
    ):
        assert logprob <= 0
        assert 1 <= len(top) <= 3
        assert top[token] >= logprob
    assert found.token_logprobs[-6:] == pytest.approx(answer.logprobs.token_logprobs, abs=0.02)


def test_a_stream_begins_with_the_prompt(client: openai.OpenAI) -> None:
    whole = complete(client, logprobs=1).choices[0]
    chunks = [chunk.choices[0] for chunk in complete(client, logprobs=1, stream=True)]
    assert chunks[0].text.startswith(PROMPT)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert [token for part in parts for token in part.tokens] == whole.logprobs.tokens
    assert [at for part in parts for at in part.text_offset] == whole.logprobs.text_offset


def test_prompts_alone(client: openai.OpenAI) -> None:
    """Several prompts, as tokens, without an answer."""
    tokens = client.post(
        f"{str(client.base_url).removesuffix('/v1/')}/tokenize",
        cast_to=object,
        body={"model": "tiny", "prompt": PROMPT},
    )
    assert isinstance(tokens, dict)
    prompts = [tokens["tokens"], tokens["tokens"][:5]]
    reply = complete(client, prompt=prompts, max_tokens=0, logprobs=1)
    assert [len(choice.logprobs.tokens) for choice in reply.choices] == list(map(len, prompts))
    assert reply.choices[0].text == PROMPT
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 0
    one, other = (choice.logprobs.token_logprobs for choice in reply.choices)
    assert one[1:5] == pytest.approx(other[1:], abs=0.02)
    text = complete(client, max_tokens=0).choices[0]
    assert (text.text, text.logprobs) == (PROMPT, None)


def test_what_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="echo is not supported"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], extra_body={"echo": True}
        )
    with pytest.raises(openai.BadRequestError, match="or 0 for a prompt with echo"):
        complete(client, echo=False, max_tokens=0)
