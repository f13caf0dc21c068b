"""The cluster's scaling policy in simulated time, with the delays that Ray applies to it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import simpy

from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.replica import Replica
from localgen.backends.engine.stats import percentile
from localgen.cluster.autoscaling import RECENT_S, REQUESTS, TTFT_P95_MS, ScalingPolicy

# how often Ray asks the policy (docs/cluster.md)
_TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class _Context:
    """What the policy reads of Ray's AutoscalingContext."""

    aggregated_metrics: Mapping[str, Mapping[str, float]]
    target_num_replicas: int
    current_num_replicas: int
    total_queued_requests: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """least, most: replicas. up_s, down_s: for how long the policy must want more, or fewer."""

    least: int
    most: int
    up_s: float
    down_s: float


class Autoscaler:
    """Asks the policy each second, and starts and drains replicas."""

    def __init__(self, cluster: Cluster, policy: ScalingPolicy, bounds: Bounds) -> None:
        self._cluster, self._policy, self._bounds = cluster, policy, bounds
        self._target = cluster.num_serving
        self._wants_more_s = self._wants_fewer_s = 0.0
        self._answered: dict[str, deque[tuple[float, float]]] = defaultdict(deque)
        cluster.on_answered = self._on_answered
        cluster.env.process(self._run())

    def _on_answered(self, replica: str, ttft_s: float) -> None:
        self._answered[replica].append((self._cluster.env.now, ttft_s * 1e3))

    def _run(self) -> Generator[simpy.Event, None, None]:
        while True:
            yield self._cluster.env.timeout(_TICK_S)
            self._set_target(self._decide())
            self._follow_target()

    def _decide(self) -> int:
        """What the policy wants, within the bounds."""
        cluster = self._cluster
        serving = [each for name, each in cluster.replicas.items() if name not in cluster.leaving]
        metrics = {
            REQUESTS: {each.name: float(each.num_requests) for each in serving},
            TTFT_P95_MS: {each.name: self._ttft_p95_ms(each) for each in serving},
        }
        wanted, _ = self._policy(_Context(metrics, self._target, len(serving)))
        return min(max(wanted, self._bounds.least), self._bounds.most)

    def _ttft_p95_ms(self, replica: Replica) -> float:
        """As localgen.cluster.autoscaling.scaling_stats() reports it."""
        now_s, answered = self._cluster.env.now, self._answered[replica.name]
        while answered and answered[0][0] < now_s - RECENT_S:
            answered.popleft()
        times_ms = [ttft_ms for _, ttft_ms in answered]
        for job in replica.jobs:
            until_s = now_s if job.first_s is None else job.first_s
            times_ms.append((until_s - job.request.arrival_s) * 1e3)
        return percentile(sorted(times_ms), 0.95)

    def _set_target(self, wanted: int) -> None:
        more, fewer = wanted > self._target, wanted < self._target
        self._wants_more_s = self._wants_more_s + _TICK_S if more else 0.0
        self._wants_fewer_s = self._wants_fewer_s + _TICK_S if fewer else 0.0
        if self._wants_more_s > self._bounds.up_s or self._wants_fewer_s > self._bounds.down_s:
            self._target = wanted
            self._wants_more_s = self._wants_fewer_s = 0.0

    def _follow_target(self) -> None:
        cluster = self._cluster
        for _ in range(self._target - cluster.num_serving - cluster.num_starting):
            cluster.start_replica()
        for _ in range(cluster.num_serving - max(1, self._target)):
            cluster.drain_replica()
