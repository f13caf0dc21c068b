"""benchmarks.simulation.agreement: costs found again, evictions reported, figures side by side."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.measure import ModelLine, Report
from benchmarks.simulation.agreement import (
    at_other_times,
    plan,
    rate_for,
    simulated_play,
    simulated_requests,
)
from benchmarks.simulation.cells import Cells
from benchmarks.simulation.cluster import Cluster, Fleet
from benchmarks.simulation.comparison import Comparison, Figures, Play, add_summary
from benchmarks.simulation.costs import SLOTS, EngineCosts
from benchmarks.simulation.gateway import PREFIX, Routing
from benchmarks.simulation.held_prompts import HeldPrompts
from benchmarks.simulation.measured_costs import MeasuredCosts, fit_factors
from benchmarks.simulation.measured_steps import KnownCells, MeasuredSteps, Steps
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.prefix_cache import SlotCache
from benchmarks.simulation.request import Request, Segment
from localgen.backends.types import Timings
from localgen.bench.measured_request import MeasuredRequest
from localgen.bench.prompts import WordPrompts
from localgen.cluster.prefix_table import ROUTED_S

COSTS = EngineCosts(
    source="made up",
    step_s=0.01,
    prompt_token_s=1e-4,
    attention_s=1e-8,
    sequence_s=1e-4,
    context_token_s=1e-7,
    request_s=0.0,
    max_seqs=8,
    batch_tokens=512,
    itl_target_s=0.1,
    kv_tokens=100_000,
    kv_bytes=1000,
    cache=SLOTS,
    cell_s=1e-7,
)
SYSTEM, QUESTION = 640, 60


def request(system: int, at_s: float, number: int, answer: int = 3) -> Request:
    """A question behind a system prompt of ten chunks."""
    chunks = tuple(f"{system} {at}".encode() for at in range(10))
    segments = (Segment(system, SYSTEM), Segment(1000 + number, QUESTION))
    return Request(at_s, chunks, segments, Segment(9000 + number, answer), SYSTEM + QUESTION)


def play(requests: list[Request], *, report_s: float = 0.0, one_by_one: bool = False) -> Outcome:
    routing = Routing(policy=PREFIX, spill=4, max_chunks=65_536, report_s=report_s)
    fleet = Fleet(replicas=2, replicas_per_machine=2, slowdowns=(1.0, 1.5))
    return Cluster(fleet, COSTS, routing, one_by_one=one_by_one).play(requests)


def test_a_step_takes_longer_for_each_cell_up_to_the_last_one_in_use() -> None:
    one, other = request(1, 0.0, 1), replace(request(2, 100.0, 2), chunks=request(1, 0.0, 1).chunks)
    outcome = play([one, other])  # both come to one replica, in steps of 512 and 188 tokens
    first, second = 512 * 512 + 188 * 768, 512 * 1280 + 188 * 1536  # to the next multiple of 256
    assert outcome.ttft_s[1] - outcome.ttft_s[0] == pytest.approx(COSTS.cell_s * (second - first))
    prompt_s = 2 * COSTS.step_s + COSTS.prompt_s(0, SYSTEM + QUESTION) + COSTS.cell_s * first
    assert outcome.ttft_s[0] == pytest.approx(prompt_s)
    alone, beside = (COSTS.decode_s(2, 1, SYSTEM + QUESTION, cells) for cells in (768, 1536))
    assert outcome.e2e_s[0] - outcome.ttft_s[0] == pytest.approx(alone)
    assert outcome.e2e_s[1] - outcome.ttft_s[1] == pytest.approx(beside)


def test_the_first_free_cells_are_taken() -> None:
    cells, small, large = Cells(4096), Segment(1, 500), Segment(2, 1000)
    cells.take(small)
    cells.take(large)
    assert cells.num_scanned({}) == 1536
    assert cells.num_scanned({2: 600}) == 1024
    cells.free(1)
    cells.take(Segment(3, 300))
    assert cells.num_scanned({}) == 1536, "the hole is filled"
    cells.free(2)
    assert cells.num_scanned({}) == 512
    cells.take(Segment(4, 1000))
    assert cells.num_scanned({4: 1000}) == 512
    assert cells.num_scanned({}) == 1536


def test_runs_of_steps_take_as_long_as_single_ones_in_a_filling_cache() -> None:
    chance, now_s, requests = random.Random(4), 0.0, []
    for number in range(400):
        now_s += chance.expovariate(4.0)
        requests.append(request(chance.randrange(8), now_s, number, chance.randint(1, 60)))
    single, runs = (play(requests, report_s=2.0, one_by_one=each) for each in (True, False))
    assert list(runs.ttft_s) == pytest.approx(list(single.ttft_s), rel=1e-9)
    assert list(runs.e2e_s) == pytest.approx(list(single.e2e_s), rel=1e-9)
    assert 0.2 < runs.hit_rate < 0.9


def test_a_gateway_forgets_what_a_replica_has_lost() -> None:
    cluster = Cluster(
        Fleet(replicas=1),
        COSTS,
        Routing(policy=PREFIX, spill=4, max_chunks=65_536, report_s=2.0),
    )
    # the caches keep four sequences: the first prompt is lost when the last one ends
    requests = [request(number, 1.0 * number, number) for number in range(8)]
    late = request(9, 8.0 + ROUTED_S, 9)
    cluster.play([*requests, late])
    (gateway,) = cluster._gateways
    table = gateway.policy._table  # type: ignore[attr-defined]
    known = [each for each in requests if table.cached_chunks(each.chunks, ["replica-0"])]
    assert known == requests[-4:]


def test_a_prompt_is_held_until_it_has_ended_and_the_cache_has_lost_it() -> None:
    cache = SlotCache(10_000)
    prompts, asked = HeldPrompts(cache), request(1, 0.0, 1)
    prompts.add(asked)
    assert prompts.take_report() == list(asked.chunks), "it waits"
    segments = (*asked.prompt, asked.answer)
    assert cache.admit(segments)
    cache.release(segments)
    prompts.end(asked)
    assert prompts.take_report() == list(asked.chunks)
    other = (asked.prompt[0], Segment(77, 10))
    assert cache.admit(other)
    cache._evict(segments)
    assert prompts.take_report() == list(asked.chunks[:9]), "its question is lost"
    cache.release(other)
    cache._evict(other)
    assert prompts.take_report() == []


def answered(prompt: int, cached: int, answer: int, took_s: float = 1.0) -> MeasuredRequest:
    arrivals = tuple((1.0 + at * took_s, at + 1) for at in range(answer))
    timings = Timings(prompt_ms=1e3, predicted_ms=500.0)
    return MeasuredRequest(0.0, 99.0, arrivals, 1.0, prompt, cached, answer, timings)


def test_the_cells_of_measured_prompts_are_followed() -> None:
    cells = KnownCells(16_384)
    steps, answer = cells.prompt_and_answer(answered(1100, 3, 2), "long", 512)
    assert (steps.took_s, steps.steps, steps.prompt_tokens) == (1.0, 3, 1097)
    assert steps.cells == 512 * 512 + 512 * 1024 + 73 * 1280
    assert steps.attended == (3 + 1097 / 2) * 1097
    assert (answer.took_s, answer.steps, answer.sequences) == (0.5, 1, 1)
    assert (answer.context, answer.others, answer.cells) == (1101, 0, 1280)
    hit, answer = cells.prompt_and_answer(answered(1180, 1100, 4), "long and more", 512)
    assert hit.cells == 80 * 1280
    assert (answer.steps, answer.context, answer.cells) == (3, 3 * 1182, 3 * 1280)
    both = cells.answers([answered(100, 0, 400, 0.1), answered(120, 0, 400, 0.1)], ["a", "b"])
    # 1186 of the hit, which holds what the first had, and half of both answers
    assert (both.sequences, both.context, both.others) == (2, 620, 310)
    assert both.cells == 2 * 2048
    assert both.took_s == pytest.approx(0.1)


class FakeGateway:
    """Has all prompts cached. A word is a token."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def ask(self, prompt: str, tokens: int) -> MeasuredRequest:
        known = [len(each.split()) for each in self.prompts if prompt.startswith(each)]
        self.prompts.append(prompt)
        return answered(len(prompt.split()), max(known, default=0), tokens)


class FakeReplica:
    def __init__(self, gateway: FakeGateway) -> None:
        self.info = SimpleNamespace(kv_tokens=16_384, options=SimpleNamespace(max_batch_tokens=512))
        self._gateway = gateway

    def empty(self) -> SimpleNamespace:
        self._gateway.prompts.clear()
        return self.info


def test_steps_are_measured_in_an_empty_cache_that_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr("benchmarks.simulation.measured_steps.time.sleep", slept_s.append)
    gateway = FakeGateway()
    measured = MeasuredSteps(gateway, FakeReplica(gateway), 2.0)  # type: ignore[arg-type]
    steps = measured.measure(WordPrompts(1))
    prompts = [each for each in steps if each.prompts]
    alone = [each for each in steps if each.sequences and not each.others]
    sizes = [1500, 120, 1500, 400, 1500, 800, 1500, 1500]
    assert [each.prompt_tokens for each in prompts] == [*sizes, *[80] * 6], "and hits"
    assert prompts[8].attended == (1500 + 40) * 80
    assert len(alone) == 1 + 14, "one stream to a short prompt, and the answers"
    together = [each for each in steps if each.others]
    assert [each.sequences for each in together] == [2, 4, 2, 4, 2, 4]
    assert min(each.context for each in together[2:]) > 2 * 1500
    assert prompts[8].cells > 80 * 1500
    assert measured.request_s == [0.0] * 6
    assert slept_s.count(4.0) == 2, "until the gateway knows who has the model"
    assert slept_s.count(1.0) == len(slept_s) - 2 == 14 + 7


def test_the_costs_of_steps_are_found_again() -> None:
    chance = random.Random(1)
    factors = [0.001, 0.003, 2e-4, 2e-7, 5e-4, 9e-7, 2e-6, 4e-8]
    steps = []
    for _ in range(30):
        size, count, cells = chance.randint(80, 1500), chance.randint(1, 4), chance.randint(1, 20)
        computed = size * 256.0 * cells
        steps.append(Steps(0.0, -(-size // 512), 1, size, size * size / 2, cells=computed))
        context = count * chance.randint(50, 1500)
        others = context * (count - 1) / count
        passed = 256.0 * count * cells
        steps.append(Steps(0.0, 1, sequences=count, context=context, others=others, cells=passed))
    times = [sum(a * b for a, b in zip(factors, each.row, strict=True)) for each in steps]
    assert fit_factors([each.row for each in steps], times) == pytest.approx(factors, rel=1e-6)


def test_simulated_arrivals_differ_a_little() -> None:
    requests = [request(number % 8, number * 0.004, number) for number in range(100)]
    moved = at_other_times(requests, 1)
    assert moved == at_other_times(requests, 1) != at_other_times(requests, 2)
    before = {each.answer.key: each.arrival_s for each in requests}
    late_s = [each.arrival_s - before[each.answer.key] for each in moved]
    assert len(moved) == 100
    assert 0.0 <= min(late_s) < max(late_s) <= 0.01
    assert [each.arrival_s for each in moved] == sorted(each.arrival_s for each in moved)


def test_a_summary_has_the_figures_of_all_plays_of_a_load() -> None:
    first, again = Play([0.5, 1.5], 100, 20, 60.0), Play([1.1, 1.3], 100, 50, 62.0)
    simulated = [Play([at], 10, 5, 60.0) for at in (1.0, 1.42)]
    comparisons = [
        Comparison(2, 0.3, 0, [first, again], simulated),
        Comparison(2, 0.3, 1, [first, first], [first]),
        Comparison(2, 0.5, 0, [again, again], [first]),
    ]
    report = Report(ModelLine("tiny", 0, 0), 2, False, 1, {})
    rows = {(row[1], row[2]): row[3:] for row in add_summary(comparisons, report)}
    assert len(rows) == 10
    # real: four times 0.5 and 1.5, 1.1, 1.3 and 0.5, 1.5; the first plays 4.0 s, the second 4.4 s
    assert rows["0.3", "ttft_mean_s"] == (
        *("1.050", "1.105", "+5.2%"),
        *("+10.0%, +0.0%", "9.5%"),
    )
    assert rows["0.3", "ttft_p50_s"][:2] == ("1.200", "1.210")
    assert rows["0.3", "ttft_p95_s"][:2] == ("1.500", "1.488")
    assert rows["0.3", "hit_rate"][:2] == ("0.275", "0.250")
    assert rows["0.3", "took_s"] == ("60.500", "60.000", "-0.8%", "-1.6%, +0.0%", "1.7%")
    assert rows["0.5", "ttft_mean_s"][:3] == ("1.200", "1.000", "-16.7%")
    assert comparisons[0].rows()[1] == (
        *("2", "0.3", "0", "ttft_mean_s", "1.000", "1.200", "1.210", "+10.0%"),
    )
    comparisons[0].add_to(report)
    found = {f"{each.test} {each.side}": each.values for each in report.series}
    of_one, of_all = "2 replicas, load 0.3, seed 0: ttft_mean_s", "2 replicas, load 0.3, all plays"
    assert found[f"{of_one} real"] == pytest.approx((1.0, 1.2))
    assert found[f"{of_one}, difference simulated"] == pytest.approx((0.1,))
    assert found[f"{of_all}: ttft_mean_s real"] == pytest.approx((1.05,))
    assert found[f"{of_all}: ttft_mean_s simulated"] == pytest.approx((1.105,))


def test_slowdowns_are_of_means_in_both_orders_after_a_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    times = itertools.cycle((1.0, 3.0))

    def busy_s(self: MeasuredCosts, count: int) -> float:
        counts.append(count)
        return next(times) * (1 + 0.2 * count)

    measured = object.__new__(MeasuredCosts)
    measured._cluster = SimpleNamespace(replicas="abc")  # type: ignore[assignment]
    measured._measured = SimpleNamespace(measure=lambda words: [])  # type: ignore[assignment]
    measured._words, measured._rounds, measured._slowdowns = WordPrompts(1), [], []
    monkeypatch.setattr(MeasuredCosts, "_busy_s", busy_s)
    monkeypatch.setattr(MeasuredCosts, "_require_one_holder", lambda self: None)
    measured.measure()
    assert counts == [3, 3, 3, 3, *(3 * (3, 2, 1, 1, 2, 3))]
    assert measured.slowdowns == pytest.approx((1.0, 1.4 / 1.2, 1.6 / 1.2))


def test_the_rate_takes_the_wanted_share_of_the_cores() -> None:
    assert rate_for(COSTS, 0.6) == pytest.approx(2 * rate_for(COSTS, 0.3))
    assert rate_for(replace(COSTS, cell_s=0.0), 0.3) > rate_for(COSTS, 0.3)


def test_the_requests_of_a_real_cluster_are_simulated_with_the_tokens_that_it_counted() -> None:
    planned = plan(60, 1.0, WordPrompts(3), seed=3)
    assert planned == plan(60, 1.0, WordPrompts(3), seed=3)
    seen = set[int]()
    answered = []
    for each in planned:
        cached = 1500 + each.system if each.system in seen else 24
        seen.add(each.system)
        answered.append(MeasuredRequest(0.0, 1.0, ((0.5, 1),), None, 1600, cached, 32))
    requests = simulated_requests(planned, answered)
    assert {request.prompt_tokens for request in requests} == {1600}
    assert {request.prompt[0].tokens - 1500 for request in requests} == seen
    chunks = {(each.system, made.chunks[0]) for each, made in zip(planned, requests, strict=True)}
    assert len(chunks) == len(seen) == 8
    costs = replace(COSTS, cell_s=0.0, cache="blocks")
    simulated = simulated_play(requests, costs, (1.0, 1.3), ("a", "b"))
    computed_once = sum(1500 + number for number in seen)
    prefixes = sum(request.prompt[0].tokens for request in requests)
    figures = Figures.of([simulated])
    assert figures.hit_rate == pytest.approx((prefixes - computed_once) / (60 * 1600), rel=0.1)
    assert figures.took_s > requests[-1].arrival_s


def test_factors_of_costs_are_found_and_never_below_zero() -> None:
    rows = [[1.0, batch, context] for batch in (1, 2, 4) for context in (50, 400, 900)]
    times = [0.01 + 0.002 * batch + 3e-6 * context for _, batch, context in rows]
    assert fit_factors(rows, times) == pytest.approx([0.01, 0.002, 3e-6])
    falling = [0.01 + 0.002 * batch - 1e-6 * context for _, batch, context in rows]
    found = fit_factors(rows, falling)
    assert found[2] == 0.0
    assert found[1] == pytest.approx(0.002, rel=0.1)


def test_steps_that_are_slow_by_chance_count_as_much_as_fast_ones() -> None:
    rows = [[1.0, batch] for batch in (1, 2, 4) for _ in range(2)]
    times = [(0.01 + 0.002 * rows[at][1]) * (0.6, 1.4)[at % 2] for at in range(6)]
    assert fit_factors(rows, times) == pytest.approx([0.01, 0.002])
