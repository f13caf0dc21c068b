"""What a gateway's router does with the replicas that Ray Serve names."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed, which needs 500 MB: make test-cluster")
from ray.serve.request_router import RequestRouter

from localgen.backends.types import CHUNK_HASH_BYTES, MAX_REPORTED_CHUNKS
from localgen.cluster.route import HELD
from localgen.cluster.router import PrefixRouter


def replica(name: str, num_chunks: int) -> Any:
    held = os.urandom(CHUNK_HASH_BYTES * num_chunks)
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={HELD: held})


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
