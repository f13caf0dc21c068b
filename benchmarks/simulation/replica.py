"""A replica: continuous batching over a prefix cache, in steps of measured cost.

Steps of an unchanged batch are one event: a run. It is cut at the end of the step in which a
request arrives, as that one is admitted then.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import simpy

from benchmarks.simulation.costs import EngineCosts
from benchmarks.simulation.held_prompts import HeldPrompts
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.prefix_cache import create_cache
from benchmarks.simulation.request import Request, Segment
from localgen.backends.engine.prompt_chunks import MIN_SHARED_TOKENS


@dataclass(slots=True, eq=False)
class Job:
    """A request in a replica. fetched_tokens: of the prompt, that come from another replica in
    fetch_s seconds.

    cached_tokens, uncomputed: of the prompt. first_s: when the first token was there, or None.
    """

    request: Request
    fetched_tokens: int = 0
    fetch_s: float = 0.0
    cached_tokens: int = 0
    uncomputed: int = 0
    first_s: float | None = None

    @property
    def computed(self) -> int:
        return self.request.prompt_tokens - self.uncomputed

    def use_cached(self, tokens: int) -> None:
        """Compute what is behind so many tokens."""
        # one is left: its logits start the answer
        self.cached_tokens = min(tokens, self.request.prompt_tokens - 1)
        self.uncomputed = self.request.prompt_tokens - self.cached_tokens

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (*self.request.prompt, self.request.answer)


@dataclass(slots=True)
class _Run:
    """Steps in a row. shares: prompt tokens of each job, in the only step of a run that has any.

    work_s, left_s: with cores of its own; what is left at the time mark_s. slowdown: since then.
    cells: of the KV cache that attention passes over.
    """

    steps: int
    cells: int
    work_s: float
    left_s: float
    mark_s: float
    slowdown: float
    shares: list[tuple[Job, int]]


class Replica:
    """on_end: called with a job at its last token.

    one_by_one: each step is a run, for tests.
    """

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        costs: EngineCosts,
        machine: Machine,
        on_end: Callable[[Replica, Job], None],
        *,
        one_by_one: bool = False,
    ) -> None:
        self._env, self.name, self._costs, self._machine = env, name, costs, machine
        self._on_end, self._one_by_one = on_end, one_by_one
        self.cache = create_cache(costs)
        self.held_prompts = HeldPrompts(self.cache)
        self._queue: deque[Job] = deque()
        self._fetching: list[Job] = []  # admitted, like those that follow
        self._prefilling: list[Job] = []  # oldest first
        self._decoding: list[tuple[int, int, Job]] = []  # a heap by the step of the last token
        self._tiebreak = itertools.count()
        self._steps = 0  # so far
        self._context_tokens = 0  # of decoding jobs
        self._run: _Run | None = None
        self._timer = 0  # the number of the one that counts
        self._is_dead = False
        self.computed_tokens = 0
        self.num_runs = 0

    @property
    def num_running(self) -> int:
        return len(self._fetching) + len(self._prefilling) + len(self._decoding)

    @property
    def num_requests(self) -> int:
        return len(self._queue) + self.num_running

    @property
    def jobs(self) -> list[Job]:
        """All that are not ended, in no order."""
        admitted = [*self._fetching, *self._prefilling]
        return [*self._queue, *admitted, *(job for _, _, job in self._decoding)]

    def submit(self, job: Job) -> None:
        self._queue.append(job)
        if self.num_running < self._costs.max_seqs:
            self._notice()

    def ready_tokens(self, prompt: Sequence[Segment]) -> int:
        """Tokens of the first segments that are computed."""
        in_flight = self._keys_in_flight()
        ready = itertools.takewhile(lambda segment: segment.key not in in_flight, prompt)
        return self.cache.cached_tokens(tuple(ready))

    def kill(self) -> list[Job]:
        """End at once. Returns the jobs that are not ended."""
        if self._run is not None:
            self._run = None
            self._timer += 1
            self._machine.leave(self)
        self._is_dead = True
        return self.jobs

    def set_slowdown(self, slowdown: float) -> None:
        if self._run is not None:
            self._settle(self._run)
            self._run.slowdown = slowdown
            self._start_timer(self._run)

    def _notice(self) -> None:
        """There is something new to do: from the end of the step on that is being computed."""
        if self._run is None:
            self._machine.enter(self)
            self._begin_run()
        elif self._run.steps > 1:
            self._cut(self._run)

    # -- runs -------------------------------------------------------------------------------

    def _begin_run(self) -> None:
        """Begin the next run, or stop computing."""
        self._admit()
        decoding, context = len(self._decoding), self._context_tokens
        shares: list[tuple[Job, int]] = []
        if self._prefilling:
            steps = 1
            shares = prompt_shares(self._prefilling, self._costs.prompt_budget(decoding, context))
        elif decoding:
            steps = 1 if self._one_by_one else self._decoding[0][0] - self._steps
        else:
            assert self._fetching or not self._queue, "a request that waits for nothing"
            self._run = None
            self._machine.leave(self)
            return
        cells = self._scanned_cells(shares)
        work_s = self._costs.decode_s(steps, decoding, context, cells)
        for job, tokens in shares:
            work_s += self._costs.prompt_s(job.computed, tokens, cells)
            if tokens == job.uncomputed:
                work_s += self._costs.first_token_s
        now_s = self._env.now
        self._run = _Run(steps, cells, work_s, work_s, now_s, self._machine.slowdown, shares)
        self._start_timer(self._run)

    def _scanned_cells(self, shares: Sequence[tuple[Job, int]]) -> int:
        """Of the KV cache, by a step that computes these prompt tokens. Answers count whole as soon
        as they begin."""
        of_step = dict(shares)
        uncomputed: dict[int, int] = {}
        for job in (*self._fetching, *self._prefilling):
            left = job.uncomputed - of_step.get(job, 0)
            for key, tokens in reversed(job.request.prompt):
                uncomputed[key] = min(left, tokens)
                left -= uncomputed[key]
            uncomputed[job.request.answer.key] = job.request.answer.tokens
        return self.cache.scanned_cells(uncomputed)

    def _start_timer(self, run: _Run) -> None:
        self._timer += 1
        timeout = self._env.timeout(max(0.0, run.left_s) * run.slowdown, self._timer)
        timeout.callbacks.append(self._on_timer)

    def _on_timer(self, event: simpy.Event) -> None:
        if event.value == self._timer and self._run is not None:
            self.num_runs += 1
            self._end_run(self._run)

    def _settle(self, run: _Run) -> None:
        run.left_s -= (self._env.now - run.mark_s) / run.slowdown
        run.mark_s = self._env.now

    def _cut(self, run: _Run) -> None:
        """End the run with the step that is being computed."""
        self._settle(run)
        decoding, context = len(self._decoding), self._context_tokens
        done_s = run.work_s - run.left_s
        steps = 1 + self._costs.steps_within(done_s, decoding, context, run.cells)
        if steps < run.steps:
            run.steps = steps
            run.work_s = self._costs.decode_s(steps, decoding, context, run.cells)
            run.left_s = run.work_s - done_s
            self._start_timer(run)

    def _end_run(self, run: _Run) -> None:
        self._steps += run.steps
        self._context_tokens += run.steps * len(self._decoding)
        for job, tokens in run.shares:
            job.uncomputed -= tokens
            self.computed_tokens += tokens
            if not job.uncomputed:
                self._begin_decoding(job)
        ended = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            job = heapq.heappop(self._decoding)[2]
            self._context_tokens -= job.request.prompt_tokens + job.request.answer.tokens - 1
            self.cache.release(job.segments)
            self.held_prompts.end(job.request)
            ended.append(job)
        self._begin_run()
        for job in ended:
            self._on_end(self, job)

    def _begin_decoding(self, job: Job) -> None:
        """The step that computed the end of the prompt gave the first token."""
        self._prefilling.remove(job)
        job.first_s = self._env.now
        last_step = self._steps + job.request.answer.tokens - 1
        heapq.heappush(self._decoding, (last_step, next(self._tiebreak), job))
        self._context_tokens += job.request.prompt_tokens

    # -- admission --------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit queued jobs in order, as the engine's scheduler does.

        One that does not fit blocks those behind it. One whose prefix is being computed waits for
        it, and lets others pass.
        """
        if not self._queue:
            return
        in_flight = self._keys_in_flight()
        waiting: deque[Job] = deque()
        while self._queue and self.num_running < self._costs.max_seqs:
            job = self._queue.popleft()
            if any(key in in_flight for key, _ in job.request.prompt):
                waiting.append(job)
                continue
            cached = self.cache.cached_tokens(job.request.prompt)
            if not self.cache.admit(job.segments):
                waiting.append(job)
                break
            job.use_cached(cached)
            if cached < job.fetched_tokens:
                self._fetching.append(job)
                timeout = self._env.timeout(job.fetch_s)
                timeout.callbacks.append(partial(self._end_fetch, job))
            else:
                self._prefilling.append(job)
            in_flight.update(_keys_in_flight(job))
        self._queue.extendleft(reversed(waiting))

    def _end_fetch(self, job: Job, _: simpy.Event) -> None:
        if self._is_dead:
            return
        self._fetching.remove(job)
        job.use_cached(job.fetched_tokens)
        self._prefilling.append(job)
        self._notice()

    def _keys_in_flight(self) -> set[int]:
        admitted = (*self._fetching, *self._prefilling)
        return {key for job in admitted for key in _keys_in_flight(job)}


def _keys_in_flight(job: Job) -> list[int]:
    """Keys of segments of a prompt that are still being computed, and worth waiting for."""
    found, end = [], 0
    for key, tokens in job.request.prompt:
        end += tokens
        if end - job.computed >= MIN_SHARED_TOKENS:
            found.append(key)
    return found


def prompt_shares(prefilling: Sequence[Job], budget: int) -> list[tuple[Job, int]]:
    """The prompt tokens of each job in a step, as prompt_chunks() of the engine shares them out.

    prefilling: oldest first. It gets what it needs if that fits, else half; the shortest others
    the rest.
    """
    oldest, others = prefilling[0], sorted(prefilling[1:], key=lambda job: job.uncomputed)
    fits = not others or oldest.uncomputed <= budget
    reserved = min(oldest.uncomputed, budget if fits else (budget + 1) // 2)
    left, shares = budget - reserved, []
    for job in others:
        tokens = min(job.uncomputed, left)
        left -= tokens
        if tokens:
            shares.append((job, tokens))
    return [(oldest, min(oldest.uncomputed, reserved + left)), *shares]
