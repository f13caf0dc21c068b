"""How many replicas a cluster wants, and that it comes to rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from localgen.cluster.autoscaling import REQUESTS, TTFT_P95_MS, ScalingPolicy, scaling_stats
from localgen.cluster.status import ReplicaStatus

BY_QUEUE = ScalingPolicy(target_requests=4)
BY_SLO = ScalingPolicy(target_requests=4, ttft_slo_ms=1000)


@pytest.mark.parametrize(("requests", "wanted"), [(0, 0), (1, 1), (4, 1), (4.5, 2), (40, 10)])
def test_replicas_for_the_queue(requests: float, wanted: int) -> None:
    assert BY_QUEUE.desired(3, requests, ttft_p95_ms=9999) == wanted


@pytest.mark.parametrize(
    ("replicas", "requests", "ttft_ms", "wanted", "why"),
    [
        (2, 4, 1500, 3, "late: one more"),
        (2, 40, 1500, 10, "the queue wants more than that"),
        (4, 3, 1500, 4, "late while replicas are idle: none more, none less"),
        (4, 8, 700, 4, "near to the SLO: none leaves"),
        (4, 8, 300, 2, "far from the SLO: by the queue"),
        (4, 0, 0, 0, "nothing to do"),
    ],
)
def test_replicas_for_the_slo(
    replicas: int, requests: float, ttft_ms: float, wanted: int, why: str
) -> None:
    assert BY_SLO.desired(replicas, requests, ttft_ms) == wanted, why


def context(current: int, target: int, queued: float, **reported: Any) -> SimpleNamespace:
    return SimpleNamespace(
        current_num_replicas=current,
        target_num_replicas=target,
        total_queued_requests=queued,
        aggregated_metrics={name: dict(enumerate(values)) for name, values in reported.items()},
    )


def test_what_ray_gives_is_read() -> None:
    load = {REQUESTS: [3.0, 4.0], TTFT_P95_MS: [200.0, 1200.0]}
    assert BY_SLO(context(2, 2, 0.0, **load)) == (3, {})
    assert BY_SLO(context(2, 2, 9.0, **load)) == (4, {}), "the gateway's queue counts"
    assert BY_SLO(context(2, 3, 0.0, **load)) == (3, {}), "one starts: no other before it is there"
    assert BY_SLO(SimpleNamespace(**vars(context(0, 0, 1.0)) | {"aggregated_metrics": None})) == (
        1,
        {},
    )


def test_a_steady_load_comes_to_rest() -> None:
    """First tokens are late by what each replica has to do: the number rises once and stays."""
    replicas, seen = 1, []
    for _ in range(30):
        ttft_ms = 400.0 * 12 / replicas
        replicas = max(1, BY_SLO.desired(replicas, 12.0, ttft_ms))
        seen.append(replicas)
    assert seen == [3, 4, 5, *[5] * 27]


def test_what_a_replica_reports() -> None:
    stats = {
        "models": [
            {
                "stats": {
                    "running": 2,
                    "waiting": 1,
                    "sequences": [
                        {"ttft_ms": 100.0, "age_s": 9.0},
                        {"ttft_ms": None, "age_s": 3.0},
                    ],
                }
            },
            {"stats": None},
        ],
        "ended": [
            {"ended_ago_s": 1.0, "ttft_ms": 50.0},
            {"ended_ago_s": 1.0, "ttft_ms": None},
            {"ended_ago_s": 60.0, "ttft_ms": 9000.0},
        ],
    }
    assert scaling_stats(stats) == {REQUESTS: 3.0, TTFT_P95_MS: 3000.0}
    assert scaling_stats({"models": [], "ended": []}) == {REQUESTS: 0.0, TTFT_P95_MS: 0.0}


def test_requests_that_wait_for_a_load_or_for_memory_keep_their_replica() -> None:
    stats = {
        "server": {"pid": 1, "waiting_for_memory": {"large": 2}},
        "models": [
            {"name": "tiny", "memory_bytes": 0, "stats": None, "active_requests": 3},
            {
                "name": "other",
                "memory_bytes": 0,
                "stats": {"running": 1, "waiting": 4},
                "active_requests": 5,
            },
        ],
    }
    status = ReplicaStatus.from_stats("r", stats)
    assert (status.running, status.waiting) == (1, 9)
    assert scaling_stats(stats)[REQUESTS] == 10.0
    assert BY_QUEUE(context(1, 1, 0.0, **{REQUESTS: [10.0]}))[0] == 3
