"""What happened to the requests of a simulation."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Outcome:
    """ttft_s, e2e_s, prompt_tokens, cached_tokens and answer_tokens are those of answered requests.

    failed: with an error, after the first token or too many tries. refused: no replica, or larger
    than a KV cache. replica_s: of all replicas, while they start as well. took_s: simulated time.
    num_events: arrivals and runs of steps. routing_wall_s: part of wall_s in which the gateways
    chose.
    """

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    e2e_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    computed_tokens: int = 0
    answer_tokens: int = 0
    failed: int = 0
    refused: int = 0
    retries: int = 0
    deaths: int = 0
    replica_s: float = 0.0
    max_replicas: int = 0
    took_s: float = 0.0
    num_events: int = 0
    wall_s: float = 0.0
    routing_wall_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return len(self.ttft_s) + self.failed + self.refused

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    def ttft_percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.ttft_s, percent)) if self.ttft_s else float("nan")

    def e2e_percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.e2e_s, percent)) if self.e2e_s else float("nan")

    def attainment(self, ttft_slo_s: float) -> float:
        """Share of all requests whose first token came in time."""
        in_time = int(np.count_nonzero(np.frombuffer(self.ttft_s) <= ttft_slo_s))
        return in_time / max(1, self.num_requests)

    def figures(self, ttft_slo_s: float) -> dict[str, float]:
        """All figures by name."""
        return {
            "requests": self.num_requests,
            "failed": self.failed,
            "refused": self.refused,
            "retries": self.retries,
            "deaths": self.deaths,
            "hit_rate": self.hit_rate,
            "ttft_p50_s": self.ttft_percentile_s(50),
            "ttft_p95_s": self.ttft_percentile_s(95),
            "ttft_p99_s": self.ttft_percentile_s(99),
            "e2e_p50_s": self.e2e_percentile_s(50),
            "e2e_p95_s": self.e2e_percentile_s(95),
            "attainment": self.attainment(ttft_slo_s),
            "computed_prompt_tokens": self.computed_tokens,
            "fetched_tokens": self.fetched_tokens,
            "answer_tokens": self.answer_tokens,
            "replica_s": self.replica_s,
            "max_replicas": self.max_replicas,
            "simulated_s": self.took_s,
            "events": self.num_events,
            "wall_s": self.wall_s,
            "routing_wall_s": self.routing_wall_s,
        }
