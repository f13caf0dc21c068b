"""Ray Serve's request router that sends a prompt where its beginning has been computed."""

from __future__ import annotations

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from localgen.cluster.prefix_table import PrefixTable

# the arguments of choose_replica(): chunks of the prompt, the replica that must answer, those that
# do not answer
RoutingArgs = tuple[tuple[bytes, ...], str | None, frozenset[str]]


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """spill: how many requests more than the least loaded replica the one with the prefix may have.

    Named in the deployment by its import path, since Ray imports it in each gateway.
    """

    def initialize_state(self, spill: int = 4) -> None:
        self._spill = spill
        self._table = PrefixTable()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        by_id = {_name(replica.replica_id): replica for replica in candidate_replicas}
        chunks, wanted, gone = _routing_args(pending_request)
        if wanted in by_id and wanted not in gone:
            return [[by_id[wanted]]]
        loads = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in by_id.items()
        }
        names = self._table.rank(chunks, loads, self._spill)
        names.sort(key=gone.__contains__)  # they may answer again
        if names:
            self._table.add(chunks, names[0])
        ranked = [by_id[name] for name in names]
        return [ranked[:1], ranked[1:]] if len(ranked) > 1 else [ranked]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._table.drop(_name(replica_id))


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _routing_args(pending: PendingRequest | None) -> RoutingArgs:
    if pending is None or len(pending.args) != 3:
        return (), None, frozenset()
    chunks, wanted, gone = pending.args
    return chunks, wanted, gone
