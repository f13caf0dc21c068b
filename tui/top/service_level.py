"""How the requests of the last minute went: failures, time in the queue, and latency goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from localgen.backends.machine_stats import EndedRequest
from localgen.bench.service_level import parse_goals
from localgen.client.snapshot import ServerSnapshot
from localgen.tui.top.problems import recently_ended, recently_failed
from localgen.tui.widgets.numbers import format_duration_ms


@dataclass(frozen=True, slots=True)
class LatencyGoal:
    """A latency that requests should not exceed.

    metric: TTFT, or TPOT, the mean time per token after the first.
    """

    metric: str
    limit_ms: float

    def is_met(self, request: EndedRequest) -> bool | None:
        """None if the request has no such latency: it has no token, or only one.

        One that failed has missed it.
        """
        if recently_failed([request]):
            return False
        rate = request.tokens_per_s
        value = request.ttft_ms if self.metric == "TTFT" else 1e3 / rate if rate else None
        return None if value is None else value <= self.limit_ms


def latency_goals(texts: Iterable[str]) -> tuple[LatencyGoal, ...]:
    """Goals from texts such as `ttft:500`. Raises InvalidRequest if one is invalid."""
    return tuple(
        LatencyGoal(metric.upper(), goal_s * 1e3)
        for text in texts
        for metric, goal_s in parse_goals(text, "--goodput")
    )


def service_level(snapshot: ServerSnapshot, goals: Sequence[LatencyGoal]) -> str:
    """One line about the last minute; empty if no request has ended in it."""
    ended = recently_ended(snapshot)
    if not ended:
        return ""
    failed = len(recently_failed(ended))
    queued_ms = sorted(each.phases.queue_ms for each in ended)
    parts = [
        f"last minute: {len(ended)} ended",
        f"{failed} failed ({failed / len(ended):.0%})" if failed else "none failed",
        *(_goal_text(goal, ended) for goal in goals),
        f"queued {format_duration_ms(median(queued_ms))}, longest "
        f"{format_duration_ms(queued_ms[-1])}",
    ]
    return " · ".join(parts)


def _goal_text(goal: LatencyGoal, ended: Sequence[EndedRequest]) -> str:
    met = [is_met for each in ended if (is_met := goal.is_met(each)) is not None]
    share = f"{sum(met) / len(met):.0%}" if met else "—"
    return f"{share} {goal.metric} ≤ {format_duration_ms(goal.limit_ms)}"
