"""A library that agents are built with, against the real server: Pydantic AI.

It takes seconds to import, so only the tests that use it do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from real_server import RealServer, real_server

QUESTION: Any = {"role": "user", "content": "What is 17 + 25?"}
ANSWER = "17 + 25 = 42."


class Sum(BaseModel):
    """What the model must give."""

    total: int


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as started:
        yield started


@pytest.fixture(scope="module", params=["chat", "responses", "messages"])
def pydantic_model(request: pytest.FixtureRequest, server: RealServer) -> Any:
    """The model of Pydantic AI for each protocol."""
    if request.param == "messages":
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(base_url=server.url, api_key="-")
        return AnthropicModel("tiny", provider=AnthropicProvider(anthropic_client=client))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="-")
    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind("tiny", provider=provider)


def test_pydantic_ai_answers(pydantic_model: Any) -> None:
    from pydantic_ai import Agent

    agent = Agent(pydantic_model, model_settings={"temperature": 0, "max_tokens": 30})
    assert agent.run_sync(QUESTION["content"]).output == ANSWER


def test_pydantic_ai_streams(pydantic_model: Any) -> None:
    from pydantic_ai import Agent

    agent = Agent(pydantic_model, model_settings={"temperature": 0, "max_tokens": 30})

    async def run() -> str:
        async with agent.run_stream(QUESTION["content"]) as streamed:
            return str([text async for text in streamed.stream_text()][-1])

    assert asyncio.run(run()) == ANSWER


def test_pydantic_ai_gets_a_value_of_its_type(pydantic_model: Any) -> None:
    """Its result is a required tool call, whose arguments the server constrains."""
    from pydantic_ai import Agent

    agent = Agent(
        pydantic_model,
        output_type=Sum,
        model_settings={"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False},
    )
    assert isinstance(agent.run_sync(QUESTION["content"]).output.total, int)
