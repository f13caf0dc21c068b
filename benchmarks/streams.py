"""Answers of concurrent clients, measured as `localgen bench` does; figures of several together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import httpx

from localgen.bench.measured_request import MeasuredRequest, Prompt, Target
from localgen.client import Client, LocalClient
from localgen.client.connection import EndpointConnection
from localgen.client.endpoints import Endpoint

# llama-server occasionally closes a new connection before it reads the request
ATTEMPTS = 5


class StreamFailed(Exception):
    """A server did not deliver the requested answer; the message says what it sent."""


class BenchClient(Protocol):
    """Interface of a client. ask: return a greedy answer of exactly max_tokens tokens."""

    def ask(self, prompt: Prompt, max_tokens: int) -> MeasuredRequest: ...


class LocalgenBenchClient:
    """localgen's own client, as used by `chat` and `run`. json_schema: constrains answers."""

    def __init__(
        self, client: LocalClient, model: str | None, json_schema: str | None = None
    ) -> None:
        self._target, self._schema = Target(client, model, None), json_schema

    def ask(self, prompt: Prompt, max_tokens: int) -> MeasuredRequest:
        return _answered(self._target.ask(prompt, max_tokens, self._schema), max_tokens)


class HttpBenchClient:
    """The same for llama-server. http: a client with its address."""

    def __init__(self, http: httpx.Client) -> None:
        endpoint = Endpoint(str(http.base_url).rstrip("/") + "/v1")
        self._target = Target(Client(EndpointConnection(endpoint, print)), None, None)

    def ask(self, prompt: Prompt, max_tokens: int) -> MeasuredRequest:
        for _ in range(ATTEMPTS - 1):
            request = self._target.ask(prompt, max_tokens)
            if not request.error:
                return _answered(request, max_tokens)
        return _answered(self._target.ask(prompt, max_tokens), max_tokens)


def _answered(request: MeasuredRequest, max_tokens: int) -> MeasuredRequest:
    if request.error:
        raise StreamFailed(request.error)
    if request.completion_tokens != max_tokens or not request.arrivals:
        raise StreamFailed(f"received {request.completion_tokens} tokens, requested {max_tokens}")
    return request


def submit_concurrently(
    clients: Sequence[BenchClient], prompts: Sequence[Prompt], max_tokens: int
) -> list[MeasuredRequest]:
    """Submit one prompt per client, all at the same time; return the streams in this order."""
    barrier = threading.Barrier(len(prompts))

    def ask(client: BenchClient, prompt: Prompt) -> MeasuredRequest:
        barrier.wait()
        return client.ask(prompt, max_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, clients, prompts))


def decode_rate(streams: Sequence[MeasuredRequest]) -> float:
    """Tokens/s of all streams while all of them decode.

    The interval begins when the last stream gets its first token, and ends when the first stream
    gets its last token. Raises StreamFailed if it is empty.
    """
    begin = max(stream.first_s for stream in streams)
    end = min(stream.last_s for stream in streams)
    if end <= begin:
        raise StreamFailed("the streams never generated together: request longer answers")
    tokens = sum(_tokens_at(stream, end) - _tokens_at(stream, begin) for stream in streams)
    return tokens / (end - begin)


def _tokens_at(stream: MeasuredRequest, time_s: float) -> int:
    return max((tokens for at_s, tokens in stream.arrivals if at_s <= time_s), default=0)


def longest_gap_ms(streams: Sequence[MeasuredRequest]) -> float:
    """Longest gap between two pieces of text in any stream."""
    return max(gap_s for stream in streams for gap_s in stream.gaps_s) * 1e3


def last_first_token_ms(streams: Sequence[MeasuredRequest]) -> float:
    """Time from the first request sent until every stream had its first token."""
    return (max(s.first_s for s in streams) - min(s.sent_s for s in streams)) * 1e3
