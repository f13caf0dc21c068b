"""The line about the last minute's requests in `localgen top`."""

from __future__ import annotations

import pytest

from localgen.backends.engine_stats import RequestPhases
from localgen.backends.errors import InvalidRequest
from localgen.backends.machine_stats import EndedRequest
from localgen.client.snapshot import ServerSnapshot
from localgen.tui.top.service_level import LatencyGoal, latency_goals, service_level


def ended(
    outcome: str = "stop",
    ago_s: float = 1.0,
    queue_ms: float = 0.0,
    ttft_ms: float | None = 100.0,
    tokens_per_s: float | None = 50.0,
) -> EndedRequest:
    return EndedRequest(
        request_id="r",
        model="m",
        client="c",
        outcome=outcome,
        ended_ago_s=ago_s,
        ttft_ms=ttft_ms,
        tokens_per_s=tokens_per_s,
        phases=RequestPhases(queue_ms=queue_ms),
    )


def level(*requests: EndedRequest, goals: tuple[str, ...] = ()) -> str:
    snapshot = ServerSnapshot(server_type="localgen", finished_requests=requests)
    return service_level(snapshot, latency_goals(goals))


def test_counts_failures_and_time_in_the_queue() -> None:
    assert level() == level(ended(ago_s=61)) == ""
    assert level(ended(queue_ms=20), ended(ago_s=61)) == (
        "last minute: 1 ended · none failed · queued 20.0 ms, longest 20.0 ms"
    )
    text = level(*(ended(queue_ms=n) for n in (10, 30, 2000)), ended("out_of_memory"))
    assert text == "last minute: 4 ended · 1 failed (25%) · queued 20.0 ms, longest 2.00 s"
    assert "none failed" in level(ended("cancelled"), ended("gone"), ended("length"))


def test_share_that_meets_a_goal() -> None:
    requests = (
        ended(ttft_ms=500.0, tokens_per_s=20.0),
        ended(ttft_ms=501.0, tokens_per_s=19.9),
        ended(ttft_ms=None, tokens_per_s=None),
    )
    text = level(*requests, goals=("ttft:500", "TPOT:50"))
    assert "none failed · 50% TTFT ≤ 500 ms · 50% TPOT ≤ 50.0 ms · queued" in text
    failed = level(requests[0], ended("out_of_memory"), goals=("ttft:500",))
    assert "1 failed (50%) · 50% TTFT" in failed
    assert " · — TTFT ≤ 500 ms · " in level(requests[-1], goals=("ttft:500",))


def test_a_server_that_lists_no_requests() -> None:
    assert service_level(ServerSnapshot(server_type="vLLM"), ()) == ""


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "e2el:5"]
)
def test_goals_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"--goodput {text}: give ttft=1s,tpot=125ms"):
        latency_goals([text])


def test_goals_have_the_names_of_vllm() -> None:
    assert latency_goals(["tpot:50"]) == (LatencyGoal("TPOT", 50.0),)
    both = LatencyGoal("TTFT", 1000.0), LatencyGoal("TPOT", 125.0)
    assert latency_goals(["ttft=1s,tpot=125ms"]) == latency_goals(["TTFT:1000", "tpot:125"]) == both
