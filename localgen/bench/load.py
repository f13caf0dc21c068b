"""Requests as they come from many people: at a rate, or a number at any time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from localgen.bench.measured_request import MeasuredRequest, Target
from localgen.bench.prompts import WordPrompts

_MAX_THREADS = 512


@dataclass(frozen=True, slots=True)
class Query:
    """A request to be sent. at_s: when, after the first; where a load has times of its own."""

    prompt: str
    max_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """A load and its requests. name: `0.5/s` or `4 at once`. took_s: from the first sent to the
    last one's end."""

    name: str
    requests: tuple[MeasuredRequest, ...]

    @property
    def answered(self) -> list[MeasuredRequest]:
        return [request for request in self.requests if not request.error]

    @property
    def took_s(self) -> float:
        if not self.requests:
            return 0.0
        first_s = min(request.sent_s for request in self.requests)
        return max(request.ended_s for request in self.requests) - first_s


def synthetic_queries(
    prompts: WordPrompts, input_tokens: int, output_tokens: int, shared_prefixes: list[str]
) -> Iterator[Query]:
    """Random prompts without end, each behind one of the shared prefixes, in turn."""
    number = 0
    while True:
        text = prompts.make(input_tokens)
        if shared_prefixes:
            text = f"{shared_prefixes[number % len(shared_prefixes)]} {text}"
        number += 1
        yield Query(text, output_tokens)


def arrival_times(rate: float, *, is_poisson: bool, seed: int = 0) -> Iterator[float]:
    """Times of requests at a rate per second: evenly apart, or at random as people come."""
    chance, at_s = random.Random(seed), 0.0
    while True:
        yield at_s
        at_s += chance.expovariate(rate) if is_poisson else 1 / rate


def at_times(queries: Iterable[Query], times: Iterable[float]) -> Iterator[Query]:
    """The queries, to be sent at these times."""
    pairs = zip(queries, times, strict=False)
    return (Query(query.prompt, query.max_tokens, at_s) for query, at_s in pairs)


class LoadGenerator:
    """Sends queries to a target, each in a thread of its own."""

    def __init__(self, target: Target, clock: Callable[[], float] = time.perf_counter) -> None:
        self._target, self._clock = target, clock
        self._pool = ThreadPoolExecutor(_MAX_THREADS)
        self._is_stopped = threading.Event()

    def open_loop(
        self,
        name: str,
        queries: Iterable[Query],
        seconds: float,
        is_enough: Callable[[list[MeasuredRequest]], bool] = lambda done: False,
    ) -> Load:
        """Send each query at its time, whatever has been answered, for some seconds.

        is_enough: called with the ended requests when one is due; True ends the load. Returns when
        all are answered.
        """
        begin_s, running = self._clock(), list[Future[MeasuredRequest]]()
        for query in queries:
            if query.at_s > seconds or self._is_stopped.is_set():
                break
            self._is_stopped.wait(max(0.0, begin_s + query.at_s - self._clock()))
            if is_enough([one.result() for one in running if one.done()]):
                break
            running.append(self._submit(query))
        return Load(name, tuple(one.result() for one in running))

    def closed_loop(self, number: int, queries: Iterable[Query], seconds: float) -> Load:
        """Keep a number of requests running: the next is sent when one has been answered.

        At least one each; none is sent after these seconds.
        """
        begin_s, source = self._clock(), iter(queries)
        running = {self._submit(query) for query, _ in zip(source, range(number), strict=False)}
        ended: list[MeasuredRequest] = []
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            ended += [one.result() for one in done]
            if self._clock() - begin_s < seconds and not self._is_stopped.is_set():
                running |= {self._submit(query) for query, _ in zip(source, done, strict=False)}
        return Load(f"{number} at once", tuple(ended))

    def close(self) -> None:
        """Send no further queries, and end those that are running."""
        self._is_stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._target.abort()

    def _submit(self, query: Query) -> Future[MeasuredRequest]:
        return self._pool.submit(self._target.ask, query.prompt, query.max_tokens)
