"""Traces: conversations behind shared system prompts, or a recorded one."""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path

from benchmarks.simulation.request import CHUNK_TOKENS, Request, Segment
from localgen.backends.block_hashes import BLOCK_TOKENS
from localgen.bench.datasets import read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations that begin at Poisson times. All lengths are in tokens.

    rate: requests per second, on average over a day. zipf: exponent of the popularity of the
    num_prompts system prompts. turns: mean of a geometric distribution. question, answer: means
    of exponential distributions. think_s: mean time from a turn to the next one of a conversation.
    swing: the rate goes from (1 - swing) to (1 + swing) of the mean in a day of day_s seconds.
    """

    rate: float
    num_requests: int
    num_prompts: int
    system: int
    zipf: float
    turns: float
    question: int
    answer: int
    think_s: float
    swing: float
    day_s: float
    seed: int

    def rate_at(self, time_s: float) -> float:
        """Requests per second; lowest at the beginning of a day."""
        return self.rate * (1 - self.swing * math.cos(2 * math.pi * time_s / self.day_s))


class _Conversation:
    """The prompt so far: its segments, and its chunks, whose last one may be incomplete."""

    def __init__(self, system: Segment, chunks: Sequence[bytes], keys: Iterator[int]) -> None:
        self._keys, self._segments, self._tokens = keys, [system], system.tokens
        self._chunks = list(chunks)

    def turn(self, arrival_s: float, question: int, answer: int) -> Request:
        self._segments.append(Segment(next(self._keys), question))
        self._tokens += question
        while len(self._chunks) < self._tokens // CHUNK_TOKENS:
            self._chunks.append(_chunk(next(self._keys)))
        reply = Segment(next(self._keys), answer)
        request = Request(
            arrival_s, tuple(self._chunks), tuple(self._segments), reply, self._tokens
        )
        self._segments.append(reply)
        self._tokens += answer
        return request


def conversations(load: Workload) -> Iterator[Request]:
    """The requests of a workload, in the order of their arrival."""
    chance, keys = random.Random(load.seed), count(1)
    systems = [Segment(next(keys), load.system) for _ in range(load.num_prompts)]
    chunks = [[_chunk(next(keys)) for _ in range(load.system // CHUNK_TOKENS)] for _ in systems]
    weights = list(accumulate((rank + 1) ** -load.zipf for rank in range(load.num_prompts)))
    waiting: list[tuple[float, int, _Conversation]] = []
    starts = _start_times(load, chance)
    next_start_s = next(starts)
    for _ in range(load.num_requests):
        if not waiting or next_start_s <= waiting[0][0]:
            number = bisect_left(weights, chance.random() * weights[-1])
            now_s, talk = next_start_s, _Conversation(systems[number], chunks[number], keys)
            next_start_s = next(starts)
        else:
            now_s, _, talk = heapq.heappop(waiting)
        yield talk.turn(now_s, _length(chance, load.question), _length(chance, load.answer))
        if chance.random() >= 1 / load.turns:
            again_s = now_s + chance.expovariate(1 / load.think_s)
            heapq.heappush(waiting, (again_s, next(keys), talk))


def _start_times(load: Workload, chance: random.Random) -> Iterator[float]:
    """Poisson times of a rate that changes, by thinning (Lewis and Shedler 1979)."""
    most, now_s = load.rate * (1 + load.swing) / load.turns, 0.0
    while True:
        now_s += chance.expovariate(most)
        if chance.random() * most <= load.rate_at(now_s) / load.turns:
            yield now_s


def _length(chance: random.Random, mean: int) -> int:
    return max(1, round(chance.expovariate(1 / mean)))


def _chunk(key: int) -> bytes:
    return key.to_bytes(8, "big")


def recorded(path: Path) -> list[Request]:
    """The requests of a trace in Mooncake's format, as `serve --record-trace` writes it.

    Raises InvalidRequest.
    """
    keys: dict[tuple[int, int], int] = {}
    entries, requests = read_trace(path), []
    for number, entry in enumerate(entries):
        segments, parent = [], 0
        for place, block in enumerate(entry.hash_ids):
            tokens = min(BLOCK_TOKENS, entry.input_length - place * BLOCK_TOKENS)
            if tokens <= 0:
                break
            parent = keys.setdefault((parent, block), len(keys) + 1)
            segments.append(Segment(parent, tokens))
        rest = entry.input_length - sum(tokens for _, tokens in segments)
        if rest:
            segments.append(Segment(-2 * number - 1, rest))
        chunks = tuple(
            _chunk(key * BLOCK_TOKENS + part)
            for key, tokens in segments
            if key > 0
            for part in range(tokens // CHUNK_TOKENS)
        )
        answer = Segment(-2 * number - 2, entry.output_length)
        arrival_s = (entry.timestamp - entries[0].timestamp) / 1e3
        requests.append(Request(arrival_s, chunks, tuple(segments), answer, entry.input_length))
    return requests
