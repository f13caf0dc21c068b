"""litellm against a server: OpenAI's and Anthropic's protocols as it speaks them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip(
    "litellm", reason="litellm is not installed, whose dependencies differ: pip install litellm"
)

import litellm  # type: ignore[import-not-found]
from real_server import real_server

ASKED: Any = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 20}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
ANSWER = "17 + 25 = 42."


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with real_server() as server:
        yield server.url


def settings(url: str, protocol: str) -> dict[str, Any]:
    base = f"{url}/v1" if protocol == "openai" else url
    return {"model": f"{protocol}/tiny", "api_base": base, "api_key": "none"}


@pytest.mark.parametrize("protocol", ["openai", "anthropic", "ollama_chat"])
def test_completion_and_stream(url: str, protocol: str) -> None:
    given = settings(url, protocol) | ASKED | {"temperature": 0}
    assert litellm.completion(**given).choices[0].message.content == ANSWER
    chunks = litellm.completion(**given, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == ANSWER


def test_messages_responses_and_embeddings(url: str) -> None:
    create = litellm.anthropic.messages.acreate
    message = asyncio.run(create(**settings(url, "anthropic"), **ASKED, temperature=0))
    assert message["content"][0]["text"] == ANSWER
    given = settings(url, "openai")
    response = litellm.responses(
        **given, input="What is 17 + 25?", max_output_tokens=20, temperature=0
    )
    assert response.output[0].content[0].text == ANSWER
    assert [
        len(each["embedding"]) for each in litellm.embedding(**given, input=["a", "b"]).data
    ] == [256, 256]


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
def test_errors_are_those_that_litellm_knows(url: str, protocol: str) -> None:
    """With them it falls back to another model, or an agent shortens its chat."""
    given = settings(url, protocol) | ASKED
    with pytest.raises(litellm.ContextWindowExceededError, match="2,048"):
        litellm.completion(**given | {"messages": [{"role": "user", "content": "word " * 3000}]})
    with pytest.raises(litellm.NotFoundError, match="nope"):
        litellm.completion(**given | {"model": f"{protocol}/nope"})


def test_a_streamed_call(url: str) -> None:
    for protocol in ("openai", "anthropic"):
        given = settings(url, protocol) | ASKED | {"max_tokens": 300, "temperature": 0}
        chunks = litellm.completion(**given, tools=[TOOL], tool_choice="required", stream=True)
        whole = litellm.stream_chunk_builder(list(chunks))
        (call, *_) = whole.choices[0].message.tool_calls
        assert call.function.name == "add"
        assert set(json.loads(call.function.arguments)) == {"a"}


def test_a_forced_call(url: str) -> None:
    given = settings(url, "openai") | ASKED | {"max_tokens": 300, "temperature": 0}
    reply = litellm.completion(**given, tools=[TOOL], tool_choice="required")
    assert reply.choices[0].message.tool_calls[0].function.name == "add"
