"""Requests as they come from many people: at a rate, or a number at any time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from localgen.bench.measured_request import MeasuredRequest, Target
from localgen.bench.prompts import WordPrompts

_MAX_THREADS = 512
_MAX_FAILURES = 50  # in a row
# for requests that run when the time of a load is over
_GRACE_S = 10.0
_LATE = "not answered 10 s after the time was over"


@dataclass(frozen=True, slots=True)
class Query:
    """A request to be sent. at_s: when, after the first; where a load has times of its own."""

    prompt: str
    max_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """A load and its requests.

    name: `0.5/s`, `4 at once` or `trace`. rate: of requests per second; 0 if they came at other
    times. concurrency: requests at any time; None if they came whatever had been answered.
    """

    name: str
    requests: tuple[MeasuredRequest, ...]
    rate: float = 0.0
    concurrency: int | None = None

    @property
    def answered(self) -> list[MeasuredRequest]:
        return [request for request in self.requests if not request.error]

    @property
    def took_s(self) -> float:
        """From the first request sent to the last one's end."""
        if not self.requests:
            return 0.0
        first_s = min(request.sent_s for request in self.requests)
        return max(request.ended_s for request in self.requests) - first_s


def rate_name(rate: float) -> str:
    """For example `0.5/s` and `1,230/s`."""
    return f"{rate:.3g}/s" if rate < 999.5 else f"{rate:,.0f}/s"


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
    """Sends queries to a target, each in a thread of its own.

    A load ends early after 50 failures in a row. Requests that are not answered within 10 s after
    its time are ended, and so is all that would follow. is_interrupted: the user ended it, and what
    has been measured counts.
    """

    def __init__(self, target: Target, clock: Callable[[], float] = time.perf_counter) -> None:
        self._target, self._clock = target, clock
        self._pool = ThreadPoolExecutor(_MAX_THREADS)
        self._is_stopped = threading.Event()
        self.is_interrupted = False

    @property
    def is_stopped(self) -> bool:
        """True if no further requests can be sent."""
        return self._is_stopped.is_set()

    def open_loop(
        self,
        name: str,
        queries: Iterable[Query],
        seconds: float,
        is_enough: Callable[[Sequence[MeasuredRequest]], bool] | None = None,
    ) -> Load:
        """Send each query at its time, whatever has been answered, for some seconds.

        is_enough: called with the ended requests when one is due; True ends the load.
        """
        begin_s = self._clock()
        running, ended = list[Future[MeasuredRequest]](), list[MeasuredRequest]()
        for query in queries:
            if query.at_s > seconds or self.is_stopped:
                break
            due_s = begin_s + query.at_s
            self._is_stopped.wait(max(0.0, due_s - self._clock()))
            if _have_failed(ended) or (is_enough is not None and is_enough(ended)):
                break
            running.append(self._pool.submit(self._ask, query, due_s))
            running[-1].add_done_callback(lambda one: ended.append(one.result()))
        _, late = wait(running, max(0.0, begin_s + seconds + _GRACE_S - self._clock()))
        if late:
            self._end_all()
        requests = (
            replace(one.result(), error=_LATE) if one in late else one.result() for one in running
        )
        return Load(name, tuple(requests))

    def closed_loop(self, number: int, queries: Iterable[Query], seconds: float) -> Load:
        """Keep a number of requests running: the next is sent when one has been answered.

        At least one each; none is sent after these seconds.
        """
        begin_s, source = self._clock(), iter(queries)
        firsts = (query for query, _ in zip(source, range(number), strict=False))
        running = {self._pool.submit(self._ask, query) for query in firsts}
        ended: list[MeasuredRequest] = []
        end_s = begin_s + seconds
        while running:
            left_s = max(0.0, end_s + _GRACE_S - self._clock())
            done, running = wait(running, left_s, FIRST_COMPLETED)
            if not done:
                self._end_all()
                ended += [replace(one.result(), error=_LATE) for one in running]
                break
            ended += [one.result() for one in done]
            if self._clock() < end_s and not self.is_stopped and not _have_failed(ended):
                nexts = (query for query, _ in zip(source, done, strict=False))
                running |= {self._pool.submit(self._ask, query) for query in nexts}
        return Load(f"{number} at once", tuple(ended), concurrency=number)

    def close(self) -> None:
        """Send no further queries, and end those that are running."""
        self._end_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end_all(self) -> None:
        self._is_stopped.set()
        self._target.abort()

    def _ask(self, query: Query, due_s: float | None = None) -> MeasuredRequest:
        """due_s: when it should be sent; a request that waits for this program counts from then."""
        request = self._target.ask(query.prompt, query.max_tokens)
        return request if due_s is None else replace(request, sent_s=due_s)


def _have_failed(ended: Sequence[MeasuredRequest]) -> bool:
    last = ended[-_MAX_FAILURES:]
    return len(last) == _MAX_FAILURES and all(request.error for request in last)
