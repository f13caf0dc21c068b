"""What a gateway's router does with the replicas that Ray Serve names."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed, which needs 500 MB: make test-cluster")
from ray.serve.request_router import RequestRouter

from localgen.backends.types import CHUNK_HASH_BYTES, MAX_REPORTED_CHUNKS
from localgen.cluster.route import HELD, KV_ADDRESS, Choice, InFlight, RoutedRequest
from localgen.cluster.router import PrefixRouter


def replica(name: str, num_chunks: int) -> Any:
    held = os.urandom(CHUNK_HASH_BYTES * num_chunks)
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name),
        replica_metadata={KV_ADDRESS: f"{name}:1"},
        routing_stats={HELD: held} if held else {},
    )


def test_all_requests_with_a_prompt_that_is_fetched_are_told_where_it_is() -> None:
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state(spill=1)
    replicas, in_flight, chunks = [replica(name, 0) for name in "ab"], InFlight(), (b"1", b"2")

    def route() -> Choice:
        routed = RoutedRequest(chunks, in_flight=in_flight)
        pending = SimpleNamespace(args=[routed])
        ranked = asyncio.run(router.choose_replicas(replicas, pending))
        return routed.choice(ranked[0][0].replica_id.unique_id, "http://replica")

    routed = [route() for _ in range(6)]
    first = routed[0].replica
    told = [each.kv_peer for each in routed if each.replica != first]
    assert len(told) > 1, "the second of them may arrive before the first"
    assert set(told) == {f"{first}:1"}
    kept = [each.kv_peer for each in routed if each.replica == first]
    assert len(kept) > 2
    assert not any(kept), "it has computed the prompt itself"


def test_the_table_has_room_for_the_reports_of_all_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    # with two models each of them reports twice as much as one of a single model
    replicas = [replica(str(number), 2 * MAX_REPORTED_CHUNKS) for number in range(9)]
    router.update_replicas(replicas)
    assert len(router._prefixes._owners) == 9 * 2 * MAX_REPORTED_CHUNKS
    router.update_replicas(replicas[:1])
    assert len(router._prefixes._owners) == 2 * MAX_REPORTED_CHUNKS, "the others have ended"
