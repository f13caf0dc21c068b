"""A cluster in simulated time: arrivals, routes, replicas that come, leave and die."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import simpy

from benchmarks.simulation.costs import EngineCosts
from benchmarks.simulation.gateway import Gateway, Routing
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.replica import Job, Replica
from benchmarks.simulation.request import Request

# tries of a request that its replica did not begin to answer, as in localgen.cluster.gateway
MAX_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """replicas: at the start. slowdowns: see Machine.

    start_s: until a new replica is ready. mean_life_s: of a replica until it dies, or None.
    names: of the replicas at the start, as rendezvous hashing depends on them; default: numbered.
    """

    replicas: int
    replicas_per_machine: int = 1
    slowdowns: tuple[float, ...] = ()
    start_s: float = 0.0
    mean_life_s: float | None = None
    seed: int = 0
    names: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request on its way. gone: replicas that died with it."""

    request: Request
    gateway: Gateway
    gone: frozenset[str] = frozenset()
    tries: int = 0


class Cluster:
    """Plays requests.

    on_answered: called with the replica's name and the time to the first token. one_by_one: see
    Replica.
    """

    def __init__(
        self, fleet: Fleet, costs: EngineCosts, routing: Routing, *, one_by_one: bool = False
    ) -> None:
        self.env = simpy.Environment()
        self.outcome = Outcome()
        self.on_answered: Callable[[str, float], None] | None = None
        self._fleet, self._costs, self._routing = fleet, costs, routing
        self._one_by_one = one_by_one
        self._chance = random.Random(fleet.seed)
        shared: dict[str, int] = {}
        self._gateways = [
            Gateway(routing.create_policy(fleet.seed + n), shared if routing.sees_all else {})
            for n in range(routing.gateways)
        ]
        self.replicas: dict[str, Replica] = {}  # that compute, those that leave included
        self.leaving: set[str] = set()
        self.num_starting = 0
        self._machines: list[Machine] = []
        self._tickets: dict[Job, _Ticket] = {}
        self._num_created = 0
        self._pending = 0  # requests that have come and not ended
        self._has_all_come = False
        self._done = self.env.event()
        self._changed_s = 0.0
        for _ in range(fleet.replicas):
            self._add_replica()

    def play(self, requests: Iterable[Request]) -> Outcome:
        """Play all requests until the last one has ended."""
        began_s = time.perf_counter()
        self.env.process(self._arrive(requests))
        if self._routing.report_s:
            self.env.process(self._report())
        self.env.run(self._done)
        outcome = self.outcome
        self._count_replica_time()
        outcome.took_s = self.env.now
        for replica in self.replicas.values():
            self._count_work(replica)
        outcome.wall_s = time.perf_counter() - began_s
        return outcome

    # -- requests ---------------------------------------------------------------------------

    def _arrive(self, requests: Iterable[Request]) -> Generator[simpy.Event, None, None]:
        for number, request in enumerate(requests):
            if request.arrival_s > self.env.now:
                yield self.env.timeout(request.arrival_s - self.env.now)
            self.outcome.num_events += 1
            self._pending += 1
            self._dispatch(_Ticket(request, self._gateways[number % len(self._gateways)]))
        self._has_all_come = True
        self._end_if_done()

    def _report(self) -> Generator[simpy.Event, None, None]:
        """Tell the gateways again and again what the replicas hold."""
        while True:
            yield self.env.timeout(self._routing.report_s)
            for replica in self.replicas.values():
                held = replica.held_prompts.take_report()
                for gateway in self._gateways:
                    gateway.policy.report(held, replica.name, self.env.now)

    def _dispatch(self, ticket: _Ticket) -> None:
        request = ticket.request
        began_s = time.perf_counter()
        route = ticket.gateway.choose(request, ticket.gone, self.env.now)
        self.outcome.routing_wall_s += time.perf_counter() - began_s
        total = request.prompt_tokens + request.answer.tokens
        if route is None or total > self._costs.kv_tokens:
            self.outcome.refused += 1
            self._end_request()
            return
        ticket.gateway.loads[route.replica] += 1
        ticket.tries += 1
        replica, job = self.replicas[route.replica], Job(request)
        self._tickets[job] = ticket
        if route.source in self.replicas:
            self._plan_fetch(job, replica, self.replicas[route.source])
        replica.submit(job)
        if self._routing.report_s:
            replica.held_prompts.add(request)

    def _plan_fetch(self, job: Job, replica: Replica, source: Replica) -> None:
        """Take a part of the prompt from another replica, if that is faster than to compute it."""
        prompt = job.request.prompt
        there, here = source.ready_tokens(prompt), replica.cache.cached_tokens(prompt)
        fetch_s = self._routing.fetch_s(max(0, there - here) * self._costs.kv_bytes)
        if there > here and fetch_s < self._costs.prompt_s(here, there - here):
            job.fetched_tokens, job.fetch_s = there, fetch_s
            self.outcome.fetched_tokens += there - here

    def _on_end(self, replica: Replica, job: Job) -> None:
        ticket = self._tickets.pop(job)
        if replica.name in ticket.gateway.loads:
            ticket.gateway.loads[replica.name] -= 1
        outcome, request = self.outcome, job.request
        assert job.first_s is not None
        overhead_s = self._costs.request_s
        ttft_s = job.first_s - request.arrival_s + overhead_s
        if self.on_answered is not None:
            self.on_answered(replica.name, ttft_s)
        outcome.ttft_s.append(ttft_s)
        outcome.e2e_s.append(self.env.now - request.arrival_s + overhead_s)
        outcome.prompt_tokens += request.prompt_tokens
        outcome.cached_tokens += job.cached_tokens
        outcome.answer_tokens += request.answer.tokens
        self._end_request()
        self._end_if_drained(replica)

    def _end_request(self) -> None:
        self._pending -= 1
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._has_all_come and not self._pending and not self._done.triggered:
            self._done.succeed()

    def _retry(self, job: Job, replica: Replica) -> None:
        """The replica has died: answer with an error what has begun, try the others again."""
        ticket = self._tickets.pop(job)
        if job.first_s is not None or ticket.tries >= MAX_TRIES:
            self.outcome.failed += 1
            self._end_request()
            return
        self.outcome.retries += 1
        ticket.gone |= {replica.name}
        self._dispatch(ticket)

    # -- replicas ---------------------------------------------------------------------------

    @property
    def num_serving(self) -> int:
        """Replicas that get requests."""
        return len(self.replicas) - len(self.leaving)

    def start_replica(self) -> None:
        """One more, ready after its start."""
        self._count_replica_time()
        self.num_starting += 1
        timeout = self.env.timeout(self._fleet.start_s)
        timeout.callbacks.append(lambda _: self._end_start())

    def drain_replica(self) -> None:
        """The replica with the fewest requests gets no more, and ends after its last one."""
        serving = [each for name, each in self.replicas.items() if name not in self.leaving]
        replica = min(serving, key=lambda each: each.num_requests)
        self.leaving.add(replica.name)
        for gateway in self._gateways:
            gateway.loads.pop(replica.name, None)
        self._end_if_drained(replica)

    def _end_start(self) -> None:
        self._count_replica_time()
        self.num_starting -= 1
        self._add_replica()

    def _add_replica(self) -> None:
        number = self._num_created
        self._num_created += 1
        if number % self._fleet.replicas_per_machine == 0:
            self._machines.append(Machine(self._fleet.slowdowns))
        replica = Replica(
            self.env,
            self._fleet.names[number] if number < len(self._fleet.names) else f"replica-{number}",
            self._costs,
            self._machines[-1],
            self._on_end,
            one_by_one=self._one_by_one,
        )
        self.replicas[replica.name] = replica
        self.outcome.max_replicas = max(self.outcome.max_replicas, len(self.replicas))
        for gateway in self._gateways:
            gateway.loads[replica.name] = 0
        if self._fleet.mean_life_s is not None:
            life_s = self._chance.expovariate(1 / self._fleet.mean_life_s)
            self.env.timeout(life_s).callbacks.append(lambda _: self._die(replica))

    def _die(self, replica: Replica) -> None:
        if replica.name not in self.replicas:
            return
        self.outcome.deaths += 1
        was_leaving = replica.name in self.leaving
        self._remove(replica)
        for gateway in self._gateways:
            gateway.loads.pop(replica.name, None)
            gateway.policy.drop(replica.name)
        if not was_leaving:
            self.start_replica()
        for job in replica.kill():
            self._retry(job, replica)

    def _end_if_drained(self, replica: Replica) -> None:
        if replica.name in self.leaving and not replica.num_requests:
            self._remove(replica)

    def _remove(self, replica: Replica) -> None:
        self._count_replica_time()
        del self.replicas[replica.name]
        self.leaving.discard(replica.name)
        self._count_work(replica)

    def _count_work(self, replica: Replica) -> None:
        self.outcome.computed_tokens += replica.computed_tokens
        self.outcome.num_events += replica.num_runs

    def _count_replica_time(self) -> None:
        """Add the time since the last change; replicas cost while they start as well."""
        now_s, count = self.env.now, len(self.replicas) + self.num_starting
        self.outcome.replica_s += (now_s - self._changed_s) * count
        self._changed_s = now_s
