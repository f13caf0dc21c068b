"""What `localgen bench` concludes: intervals, differences, people, goodput."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from bench_targets import measured

from localgen.backends.errors import InvalidRequest
from localgen.bench.estimates import percentile, ratio_interval, wilson_interval
from localgen.bench.goodput import MIN_REQUESTS, Goodput, Probe, find_goodput
from localgen.bench.measured_request import MeasuredRequest
from localgen.bench.saved_results import difference
from localgen.bench.service_level import ServiceLevel, parse_service_level, people_served

LEVEL = ServiceLevel()


def test_percentiles_are_interpolated() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0, 0.5, 0.75, 1)] == [1, 2, 2.5, 3]


@pytest.mark.parametrize(
    ("kept", "total", "low", "high"),
    [(19, 20, 0.764, 0.991), (0, 10, 0.0, 0.278), (50, 50, 0.929, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson(kept: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(kept, total) == pytest.approx((low, high), abs=1e-3)


def test_the_interval_of_a_ratio_is_that_of_welch() -> None:
    # worked out by hand: t(4) = 2.776, both sides 1, e, e^2
    values = [1.0, math.e, math.e**2]
    found = ratio_interval(values, [10 * value for value in values])
    assert found is not None
    half = 2.776 * math.sqrt(2 / 3)
    assert found == pytest.approx((10, 10 * math.exp(-half), 10 * math.exp(half)), rel=1e-3)


def runs(mean: float, seed: int) -> list[float]:
    """Five rounds of a machine with a noise of 1.5 %."""
    chance = random.Random(seed)
    return [chance.gauss(mean, 0.015 * mean) for _ in range(5)]


def test_equal_builds_do_not_differ_and_a_slower_one_does() -> None:
    equal = [difference(runs(30, seed), runs(30, 1000 + seed)) for seed in range(100)]
    slower = [difference(runs(30, seed), runs(28.5, 2000 + seed)) for seed in range(100)]
    assert sum("no difference that can be told" in text for text in equal) >= 95
    assert sum(text.startswith("-") for text in slower) >= 80


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ([100, 101, 99], [104, 105, 103], "+4.0 % (+1.7 to +6.3)"),
        ([100, 101, 99], [100, 102, 98], "no difference that can be told (-4.1 to +4.2)"),
        ([100], [100, 101], "measured once: give it more --time to tell a difference"),
        ([100, 100], [110, 110], "+10.0 % (+10.0 to +10.0)"),
    ],
)
def test_differences(before: Sequence[float], after: Sequence[float], says: str) -> None:
    assert difference(before, after) == says


def waiting(number: int, each_s: float) -> list[MeasuredRequest]:
    """Requests at the same moment: the first word of each comes after that of the one before."""
    return [measured((at + 1) * each_s) for at in range(number)]


def test_people_between_the_numbers_that_were_tried() -> None:
    # each takes 0.2 s: the first word of the fifth comes after 1 s
    tried = {number: waiting(number, 0.2) * 4 for number in (1, 4, 16)}
    people = people_served(tried, LEVEL)
    assert people is not None
    assert people.low <= people.count <= people.high
    assert people.count == 5
    assert not people.is_minimum


def test_people_at_the_ends() -> None:
    slow = people_served({1: waiting(1, 2.0), 4: waiting(4, 2.0)}, LEVEL)
    fast = people_served({1: waiting(1, 0.01), 4: waiting(4, 0.01)}, LEVEL)
    failed = people_served({1: waiting(1, 0.1), 4: [MeasuredRequest(0, 1, error="full")]}, LEVEL)
    assert slow is not None
    assert fast is not None
    assert failed is not None
    assert (slow.count, fast.count, failed.count) == (0, 4, 1)
    assert fast.is_minimum
    assert people_served({}, LEVEL) is None


@pytest.mark.parametrize(
    ("text", "ttft_s", "tpot_s"),
    [("ttft=1s,tpot=125ms", 1, 0.125), ("tpot:50", 1, 0.05), (" ttft:0.5s ", 0.5, 0.125)],
)
def test_service_levels(text: str, ttft_s: float, tpot_s: float) -> None:
    assert parse_service_level(text) == ServiceLevel(ttft_s, tpot_s)


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=1", "ttft=0s", "ttft=fast", "e2e=3s", "ttft=1s,", "1s", "ttft=1s,ttft=2s"],
)
def test_invalid_service_levels(text: str) -> None:
    with pytest.raises(InvalidRequest, match="give ttft=1s,tpot=125ms"):
        parse_service_level(text)


def search(knee: float, width: float, chance: random.Random, seconds: float = math.inf) -> Goodput:
    """Search where 95 % keep the level at the knee, and fewer at higher rates."""
    now_s = 0.0

    def share_kept(rate: float) -> float:
        return 1 / (1 + math.exp(math.log(rate / knee) / width - math.log(19)))

    def probe(rate: float, goodput: Goodput) -> Probe | None:
        nonlocal now_s
        kept = total = 0
        if now_s + MIN_REQUESTS / rate > seconds:
            return None
        while now_s < seconds and not goodput.is_enough(kept, total):
            kept, total = kept + (chance.random() < share_kept(rate)), total + 1
            now_s += 1 / rate
        return Probe(rate, kept, total)

    return find_goodput(probe, knee * chance.uniform(0.05, 3), 0.95)


@pytest.mark.parametrize("width", [0.01, 0.05, 0.2])
def test_the_knee_of_a_server_is_within_the_interval(width: float) -> None:
    found = [search(3.0, width, random.Random(seed)) for seed in range(100)]
    assert sum(one.low <= 3.0 <= one.high for one in found) >= 95
    assert sum(one.high < 3 * one.low for one in found) >= 90, "and the interval says something"
    assert all(len(one.probes) <= 15 for one in found)


def test_a_search_without_time_says_little_but_nothing_wrong() -> None:
    found = [search(3.0, 0.05, random.Random(seed), 20.0) for seed in range(100)]
    assert sum(one.low <= 3.0 <= one.high for one in found) >= 95


@pytest.mark.parametrize("width", [0.05, 0.2])
def test_five_minutes_find_the_knee_roughly(width: float) -> None:
    found = [search(3.0, width, random.Random(seed), 300.0) for seed in range(100)]
    errors = sorted(abs(math.log(one.rate / 3.0)) for one in found if one.rate)
    assert len(errors) >= 98
    assert errors[50] < 0.12
    assert errors[90] < 0.5


def test_a_server_that_never_keeps_the_level() -> None:
    found = find_goodput(lambda rate, _: Probe(rate, 0, 50), 1.0, 0.95)
    assert (found.low, found.rate) == (0.0, 0.0)
    assert found.high == found.probes[-1].rate == 0.5 ** (len(found.probes) - 1)
