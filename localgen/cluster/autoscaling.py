"""How many replicas a cluster should have: a policy for Ray Serve's autoscaler, and its input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localgen.backends.engine.stats import percentile
from localgen.cluster.totals import count_requests

# what a replica reports to Ray, by name
REQUESTS, TTFT_P95_MS = "requests", "ttft_p95_ms"
# times to the first token count for this time
RECENT_S = 10.0
# replicas are kept until the first token takes less than this part of the SLO, so that the one that
# leaves is not missed at once
_EASY = 0.5


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Replicas for the queue, and one more at a time while first tokens are late.

    target_requests: running and waiting ones that a replica should have. ttft_slo_ms: for the
    95th percentile of the time to the first token, or None to scale by the queue alone. Ray applies
    the delays and bounds of the deployment.
    """

    target_requests: int
    ttft_slo_ms: int | None = None

    def desired(self, replicas: int, requests: float, ttft_p95_ms: float) -> int:
        """The number of replicas that `requests` need. replicas: ready and starting ones.

        First tokens that are late while replicas are idle call for no more of them: then the prompt
        itself takes that long.
        """
        by_queue = math.ceil(requests / self.target_requests)
        if self.ttft_slo_ms is None or not requests:
            return by_queue
        if ttft_p95_ms > self.ttft_slo_ms and requests > replicas:
            return max(by_queue, replicas + 1)
        if ttft_p95_ms > self.ttft_slo_ms * _EASY:
            return max(by_queue, replicas)
        return by_queue

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Called by Ray's controller. context: ray.serve.config.AutoscalingContext."""
        reported = context.aggregated_metrics or {}
        in_replicas = sum(reported.get(REQUESTS, {}).values())
        ttft_p95_ms = max(reported.get(TTFT_P95_MS, {}).values(), default=0.0)
        replicas = context.target_num_replicas
        if context.current_num_replicas < replicas:
            # what is late now is late for want of those that start
            ttft_p95_ms = min(ttft_p95_ms, self.ttft_slo_ms or 0.0)
        requests = in_replicas + context.total_queued_requests
        return self.desired(replicas, requests, ttft_p95_ms), {}


def scaling_stats(stats: Mapping[str, Any]) -> dict[str, float]:
    """Load of a replica, for ScalingPolicy. stats: /v1/stats of its server.

    A request that waits for its first token counts with the time that it has waited.
    """
    engines = [model.get("stats") or {} for model in stats["models"]]
    running = [each for engine in engines for each in engine.get("sequences") or ()]
    ended = [each for each in stats.get("ended") or () if each["ended_ago_s"] <= RECENT_S]
    times_ms = [each["ttft_ms"] for each in ended if each.get("ttft_ms")]
    times_ms += [each.get("ttft_ms") or each["age_s"] * 1e3 for each in running]
    return {
        REQUESTS: float(sum(count_requests(stats))),
        TTFT_P95_MS: percentile(sorted(times_ms), 0.95),
    }
