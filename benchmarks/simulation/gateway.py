"""Gateways: each chooses replicas by a policy, with what it knows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.simulation.request import Request
from localgen.cluster.prefix_table import PrefixTable

ROUND_ROBIN, LEAST_LOAD, PREFIX, FETCH = "round-robin", "least-load", "prefix", "prefix-fetch"
POLICIES = (ROUND_ROBIN, LEAST_LOAD, PREFIX, FETCH)


@dataclass(frozen=True, slots=True)
class GatewayRoute:
    """replica: by name. source: the one that may have more of the prompt, or None."""

    replica: str
    source: str | None = None


class Policy(Protocol):
    """Chooses among the replicas that get requests."""

    def choose(self, request: Request, loads: Mapping[str, int], now_s: float) -> GatewayRoute:
        """loads: requests of each replica; there is at least one."""
        ...

    def report(self, held: Sequence[bytes], replica: str, now_s: float) -> None:
        """The replica has told which chunks it holds."""
        ...

    def drop(self, replica: str) -> None:
        """The replica has died."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, loads: Mapping[str, int], now_s: float) -> GatewayRoute:
        names = list(loads)
        self._next = (self._next + 1) % len(names)
        return GatewayRoute(names[self._next])

    def report(self, held: Sequence[bytes], replica: str, now_s: float) -> None:
        """Nothing is remembered."""

    def drop(self, replica: str) -> None:
        """Nothing is remembered."""


class LeastLoad:
    """Any of the replicas with the fewest requests."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def choose(self, request: Request, loads: Mapping[str, int], now_s: float) -> GatewayRoute:
        least = min(loads.values())
        return GatewayRoute(
            self._chance.choice([name for name, load in loads.items() if load == least])
        )

    def report(self, held: Sequence[bytes], replica: str, now_s: float) -> None:
        """Nothing is remembered."""

    def drop(self, replica: str) -> None:
        """Nothing is remembered."""


class PrefixAware:
    """The router of a cluster: PrefixTable.rank, and what it does with the first.

    fetches: names a replica that has more of the prompt than the one that was chosen.
    """

    def __init__(self, spill: int, max_chunks: int, *, fetches: bool) -> None:
        self._spill, self._fetches = spill, fetches
        self._table = PrefixTable(max_chunks)

    def choose(self, request: Request, loads: Mapping[str, int], now_s: float) -> GatewayRoute:
        first = self._table.rank(request.chunks, loads, self._spill)[0]
        source = self._source(request, loads, first) if self._fetches else None
        self._table.add(request.chunks, first, now_s)
        return GatewayRoute(first, source)

    def report(self, held: Sequence[bytes], replica: str, now_s: float) -> None:
        self._table.report(held, replica, now_s)

    def drop(self, replica: str) -> None:
        self._table.drop(replica)

    def _source(self, request: Request, loads: Mapping[str, int], first: str) -> str | None:
        cached = self._table.cached_chunks(request.chunks, loads)
        most = max(cached.values(), default=0)
        having = [(loads[name], name) for name, count in cached.items() if count == most]
        return min(having)[1] if most > cached.get(first, 0) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """policy: of POLICIES. gateways: with tables of their own, which requests reach in turn.

    sees_all: each gateway knows the requests of all, not only its own. spill, max_chunks: of the
    prefix policies. report_s: between two reports of what a replica holds; 0: there are none, and
    it is taken to hold all that it was sent. fetch_latency_s: until the first byte of a prefix from
    another replica comes. fetch_bytes_s: bytes of it per second.
    """

    policy: str
    spill: int
    max_chunks: int
    gateways: int = 1
    sees_all: bool = False
    report_s: float = 0.0
    fetch_latency_s: float = 0.0
    fetch_bytes_s: float = 1.0

    def create_policy(self, seed: int) -> Policy:
        if self.policy == ROUND_ROBIN:
            return RoundRobin()
        if self.policy == LEAST_LOAD:
            return LeastLoad(random.Random(seed))
        return PrefixAware(self.spill, self.max_chunks, fetches=self.policy == FETCH)

    def fetch_s(self, num_bytes: int) -> float:
        return self.fetch_latency_s + num_bytes / self.fetch_bytes_s


class Gateway:
    """A policy with a view of the load: running and waiting requests of each replica.

    loads: shared by gateways that see all.
    """

    def __init__(self, policy: Policy, loads: dict[str, int]) -> None:
        self.policy, self.loads = policy, loads

    def choose(self, request: Request, gone: frozenset[str], now_s: float) -> GatewayRoute | None:
        """A replica, of those that are not gone if there is another. None if there is none."""
        loads: Mapping[str, int] = self.loads
        if gone:
            loads = {name: load for name, load in loads.items() if name not in gone} or loads
        return self.policy.choose(request, loads, now_s) if loads else None
