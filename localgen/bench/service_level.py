"""How many people a machine serves before it feels slow."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localgen.backends.errors import InvalidRequest
from localgen.bench.estimates import bootstrap_interval, percentile

if TYPE_CHECKING:
    from localgen.bench.measured_request import MeasuredRequest

# of the requests keep the level
SHARE = 0.95
# a number without a unit is in ms behind a colon, as in vLLM's benchmark
_GOAL = re.compile(r"(ttft|tpot)(?:=(?=[\d.]+m?s)|:)(\d+(?:\.\d+)?)(ms|s|)")


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Goals of a request, in seconds: time to first token, and time per output token after it."""

    ttft_s: float = 1.0
    tpot_s: float = 0.125

    def is_kept(self, request: MeasuredRequest) -> bool:
        return not request.error and request.ttft_s <= self.ttft_s and request.tpot_s <= self.tpot_s

    def text(self) -> str:
        """For example `their first word within 1.0 s and 8.0 tok/s each`."""
        return f"their first word within {self.ttft_s:g} s and {1 / self.tpot_s:.3g} tok/s each"


@dataclass(frozen=True, slots=True)
class People:
    """How many people may ask at the same moment, and the 95 % interval of that.

    is_minimum: as many as were tried, so perhaps more.
    """

    count: int
    low: int
    high: int
    is_minimum: bool


def parse_service_level(text: str) -> ServiceLevel:
    """Parse `ttft=1s,tpot=125ms`; what is not given is as by default. Raises InvalidRequest."""
    return ServiceLevel(**{f"{metric}_s": goal_s for metric, goal_s in parse_goals(text, "--slo")})


def parse_goals(text: str, option: str) -> list[tuple[str, float]]:
    """Parse `ttft=1s,tpot=125ms` or `ttft:500`, which is in ms.

    Returns ttft and tpot with their goals in seconds. Raises InvalidRequest with the option's name.
    """
    goals: dict[str, float] = {}
    for part in text.split(","):
        found = _GOAL.fullmatch(part.strip().lower())
        seconds = float(found[2]) / (1 if found[3] == "s" else 1e3) if found else 0.0
        if not found or not seconds or found[1] in goals:
            raise InvalidRequest(f"{option} {text}: give ttft=1s,tpot=125ms, or one of them")
        goals[found[1]] = seconds
    return list(goals.items())


def people_served(
    by_sessions: Mapping[int, Sequence[MeasuredRequest]], level: ServiceLevel
) -> People | None:
    """How many may ask at once so that 95 % of them get the level; between the numbers that were
    tried, times are interpolated. None if none was tried.
    """
    tried = sorted(by_sessions)
    if not tried:
        return None
    groups = [
        [
            math.inf if r.error else max(r.ttft_s / level.ttft_s, r.tpot_s / level.tpot_s)
            for r in all_
        ]
        for all_ in (by_sessions[number] for number in tried)
    ]

    def count(drawn: list[list[float]]) -> float:
        return _last_within(tried, [percentile(group, SHARE) for group in drawn])

    low, high = bootstrap_interval(groups, count)
    found = int(count(groups))
    return People(found, int(low), int(high), found == tried[-1])


def _last_within(numbers: Sequence[int], loads: Sequence[float]) -> float:
    """The highest number whose load is at most 1, from the loads of some of them; 0 if none."""
    if loads[0] > 1:
        return 0
    for at in range(1, len(numbers)):
        if loads[at] > 1:
            begin, end = numbers[at - 1], numbers[at]
            if math.isinf(loads[at]):
                return begin
            share = (1 - loads[at - 1]) / (loads[at] - loads[at - 1])
            return math.floor(begin + share * (end - begin))
    return numbers[-1]
