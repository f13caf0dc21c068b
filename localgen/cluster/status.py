"""The replicas of a running cluster, as its gateway tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

from localgen.backends.errors import ServerUnavailable
from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_size
from localgen.cluster.running import RunningCluster
from localgen.cluster.totals import REPLICAS, count_requests

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica. models: loaded ones. running, waiting: requests. memory_bytes: of its models."""

    HEADER: ClassVar = ("REPLICA", "PID", "MODELS", "RUNNING", "WAITING", "MEMORY")

    name: str
    pid: int
    models: tuple[str, ...]
    running: int
    waiting: int
    memory_bytes: int

    @classmethod
    def from_stats(cls, name: str, stats: dict[str, Any]) -> ReplicaStatus:
        """stats: /v1/stats of the replica."""
        models = stats["models"]
        running, waiting = count_requests(stats)
        return cls(
            name=name,
            pid=stats["server"]["pid"],
            models=tuple(model["name"] for model in models),
            running=running,
            waiting=waiting,
            memory_bytes=sum(model["memory_bytes"] for model in models),
        )

    def cells(self) -> tuple[str, ...]:
        models = ", ".join(self.models) or "-"
        counts = (str(self.running), str(self.waiting))
        return (self.name, str(self.pid), models, *counts, format_size(self.memory_bytes))


def fetch_status(cluster: RunningCluster) -> list[ReplicaStatus]:
    """Ask the gateway for its replicas. Raises ServerUnavailable if it does not answer."""
    key = cluster.api_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(f"{cluster.url}/v1/stats", headers=headers, timeout=_TIMEOUT_S)
        reply.raise_for_status()
    except httpx.HTTPError as error:
        raise ServerUnavailable(
            f"the gateway at {cluster.url} does not answer: {one_line(str(error))}"
        ) from error
    found = reply.json()[REPLICAS]
    return [ReplicaStatus.from_stats(name, found[name]) for name in sorted(found)]
