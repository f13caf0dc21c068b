"""Ray Serve's request router that sends a prompt where its beginning has been computed."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from localgen.backends.types import CHUNK_HASH_BYTES, split_hashes
from localgen.cluster.model_table import ModelTable, serving
from localgen.cluster.prefix_table import PrefixTable, table_chunks
from localgen.cluster.route import HELD, MODELS, RoutedRequest, kv_address


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """spill: how many requests more than the least loaded replica the one with the prefix may have.

    Without Ray's FIFOMixin, which would give the replica to the request that waits longest. Named
    in the deployment by its import path, since Ray imports it in each gateway.
    """

    def initialize_state(self, spill: int = 4) -> None:
        self._spill = spill
        self._prefixes, self._models = PrefixTable(), ModelTable()
        self._names = set[str]()
        self._reports: dict[str, bytes | None] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        route: RoutedRequest = pending_request.args[0] if pending_request else RoutedRequest()
        by_id = {_name(replica.replica_id): replica for replica in candidate_replicas}
        if not by_id:
            return []
        route.cached = self._prefixes.cached_chunks(route.chunks, by_id.keys() - route.gone)
        route.kv_addresses = {
            name: kv_address(route.model, replica.replica_metadata, replica.routing_stats)
            for name, replica in by_id.items()
        }
        now_s = time.monotonic()
        if route.wanted in by_id and route.wanted not in route.gone:
            route.sources = {route.wanted: self._fetch_source(route, route.wanted, now_s)}
            return [[by_id[route.wanted]]]
        names = self._rank(route, by_id)
        names.sort(key=route.gone.__contains__)  # they may answer again
        route.sources = {names[0]: self._fetch_source(route, names[0], now_s)}
        self._prefixes.add(route.chunks, names[0], now_s)
        route.assign(names[0])
        if route.model:
            self._models.give(route.model, names[0], now_s)
        ranked = [by_id[name] for name in names]
        return [ranked[:1], ranked[1:]] if len(ranked) > 1 else [ranked]

    def _fetch_source(self, route: RoutedRequest, name: str, now_s: float) -> str:
        """The replica from which this one fetches the prompt, now or already, or empty."""
        source, count = route.best_source(name)
        if not source:
            return self._prefixes.fetch_source(route.chunks, name, now_s)
        missing = route.chunks[route.cached.get(name, 0) : count]
        self._prefixes.note_fetch(missing, name, source, now_s)
        return source

    def _rank(self, route: RoutedRequest, by_id: Mapping[str, RunningReplica]) -> list[str]:
        """All replicas, best first: those with the model, and of these the one with the prefix."""
        # not what replicas report to Ray: it forgets that after some seconds, and a gateway that is
        # killed leaves requests there which never end
        loads = {name: route.in_flight.counts[name] for name in by_id}
        best = loads
        if route.model:
            reported = {name: each.routing_stats.get(MODELS, ()) for name, each in by_id.items()}
            best = serving(loads, self._models.holders(route.model, reported, time.monotonic()))
        rest = {name: load for name, load in loads.items() if name not in best}
        ranked = self._prefixes.rank(route.chunks, best, self._spill)
        return ranked + self._prefixes.rank(route.chunks, rest, self._spill)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = {_name(replica.replica_id) for replica in replicas}
        for name in self._names - names:
            self._drop(name)
        self._names = names
        reports = {_name(each.replica_id): each.routing_stats.get(HELD) for each in replicas}
        reported = sum(len(held or b"") for held in reports.values()) // CHUNK_HASH_BYTES
        self._prefixes.grow(table_chunks(len(names), reported))
        for name, held in reports.items():
            self._read_report(name, held)

    def _read_report(self, name: str, held: bytes | None) -> None:
        if held is not None and held != self._reports.get(name):
            self._prefixes.report(split_hashes(held), name, time.monotonic())
        self._reports[name] = held

    def _drop(self, name: str) -> None:
        self._prefixes.drop(name)
        self._reports.pop(name, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._drop(_name(replica_id))


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)
