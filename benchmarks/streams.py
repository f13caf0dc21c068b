"""Streamed answers of concurrent clients, with the arrival time of each token."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import httpx

from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client import Completion, LocalClient, TextDelta
from localgen.client.request_body import message_fields

# llama-server occasionally closes a new connection before it reads the request
ATTEMPTS = 5
Prompt = str | tuple[Message, ...]


class StreamFailed(Exception):
    """A server did not deliver the requested answer; the message says what it sent."""


@dataclass(slots=True)
class Stream:
    """One answer as seen by its client; times in seconds of one clock.

    arrivals: time of each piece of text, and the number of answer tokens received by then.
    """

    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engine_ttft_ms: float = 0.0

    def arrived(self, text: str, num_tokens: int) -> None:
        self.arrivals.append((time.perf_counter(), num_tokens))
        self.text += text

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        return self.arrivals[-1][0]

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.sent_s) * 1e3

    def tokens_at(self, time_s: float) -> int:
        """Number of tokens received by that time."""
        return max((tokens for at_s, tokens in self.arrivals if at_s <= time_s), default=0)


class BenchClient(Protocol):
    """Interface of a client. ask: return a greedy answer of exactly max_tokens tokens."""

    def ask(self, prompt: Prompt, max_tokens: int) -> Stream: ...


class LocalgenBenchClient:
    """localgen's own client, as used by `chat` and `run`. json_schema: constrains answers."""

    def __init__(
        self, client: LocalClient, model: str | None, json_schema: str | None = None
    ) -> None:
        self._client, self._model, self._schema = client, model, json_schema

    def ask(self, prompt: Prompt, max_tokens: int) -> Stream:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=self._schema is None,
            json_schema=self._schema,
        )
        stream = Stream(sent_s=time.perf_counter())
        for part in self._parts(prompt, params):
            match part:
                case TextDelta(text, num_tokens):
                    stream.arrived(text, num_tokens)
                case Completion():
                    stream.prompt_tokens = part.prompt_tokens or 0
                    stream.cached_tokens = part.cached_tokens or 0
                    stream.completion_tokens = part.completion_tokens
                    stream.engine_ttft_ms = part.timings.ttft_ms
        return _ended(stream, max_tokens)

    def _parts(self, prompt: Prompt, params: SamplingParams) -> Iterator[TextDelta | Completion]:
        if isinstance(prompt, str):
            return self._client.complete(self._model, prompt, params)
        return self._client.chat(self._model, prompt, params)


class HttpBenchClient:
    """An httpx client of llama-server; each event of its stream carries one token."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ask(self, prompt: Prompt, max_tokens: int) -> Stream:
        body: dict[str, object] = {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        if isinstance(prompt, str):
            path, body["prompt"] = "/v1/completions", prompt
        else:
            path, body["messages"] = (
                "/v1/chat/completions",
                [message_fields(message) for message in prompt],
            )
        for _ in range(ATTEMPTS):
            with contextlib.suppress(httpx.RemoteProtocolError):
                return _ended(self._stream(path, body), max_tokens)
        raise StreamFailed(f"llama-server closed the connection of {ATTEMPTS} requests")

    def _stream(self, path: str, body: dict[str, object]) -> Stream:
        stream = Stream(sent_s=time.perf_counter())
        with self._http.stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                raise StreamFailed(f"llama-server: {reply.read().decode()}")
            for line in reply.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take_event(stream, json.loads(line.removeprefix("data: ")))
        return stream


def _take_event(stream: Stream, event: dict[str, object]) -> None:
    match event:
        case {"choices": [{"text": str(text)}, *_]} if text:
            stream.arrived(text, len(stream.arrivals) + 1)
        case {"choices": [{"delta": {"content": str(text)}}, *_]} if text:
            stream.arrived(text, len(stream.arrivals) + 1)
    match event:
        case {"timings": {"cache_n": int(cached), "prompt_n": int(new), "predicted_n": int(made)}}:
            stream.prompt_tokens, stream.cached_tokens = cached + new, cached
            stream.completion_tokens = made


def _ended(stream: Stream, max_tokens: int) -> Stream:
    stream.ended_s = time.perf_counter()
    if stream.completion_tokens != max_tokens or not stream.arrivals:
        raise StreamFailed(f"received {stream.completion_tokens} tokens, requested {max_tokens}")
    return stream


def submit_concurrently(
    clients: Sequence[BenchClient], prompts: Sequence[Prompt], max_tokens: int
) -> list[Stream]:
    """Submit one prompt per client, all at the same time; return the streams in this order."""
    barrier = threading.Barrier(len(prompts))

    def ask(client: BenchClient, prompt: Prompt) -> Stream:
        barrier.wait()
        return client.ask(prompt, max_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, clients, prompts))


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens/s of all streams while all of them decode.

    The interval begins when the last stream gets its first token, and ends when the first stream
    gets its last token. Raises StreamFailed if it is empty.
    """
    begin = max(stream.first_s for stream in streams)
    end = min(stream.last_s for stream in streams)
    if end <= begin:
        raise StreamFailed("the streams never generated together: request longer answers")
    tokens = sum(stream.tokens_at(end) - stream.tokens_at(begin) for stream in streams)
    return tokens / (end - begin)


def output_rate(streams: Sequence[Stream]) -> float:
    """Output tokens/s from the first request sent to the end of the last answer."""
    took_s = max(s.ended_s for s in streams) - min(s.sent_s for s in streams)
    return sum(stream.completion_tokens for stream in streams) / took_s


def longest_gap_ms(streams: Sequence[Stream]) -> float:
    """Longest gap between two pieces of text in any stream."""
    times = [[at_s for at_s, _ in stream.arrivals] for stream in streams]
    return max(late - early for at in times for early, late in pairwise(at)) * 1e3


def last_first_token_ms(streams: Sequence[Stream]) -> float:
    """Time from the first request sent until every stream had its first token."""
    return (max(s.first_s for s in streams) - min(s.sent_s for s in streams)) * 1e3
