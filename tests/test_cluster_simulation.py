"""benchmarks.simulation agrees with queues, caches and hit rates that are known in closed form."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulation.__main__ import main, parse, routing_of
from benchmarks.simulation.autoscaler import Autoscaler, Bounds
from benchmarks.simulation.cluster import Cluster, Fleet
from benchmarks.simulation.costs import FOLDER, EngineCosts, load_costs
from benchmarks.simulation.gateway import FETCH, LEAST_LOAD, POLICIES, PREFIX, ROUND_ROBIN, Routing
from benchmarks.simulation.machine import fair_shares
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.prefix_cache import BlockCache, SlotCache
from benchmarks.simulation.request import Request, Segment
from benchmarks.simulation.workload import Workload, conversations, recorded
from localgen.backends.llamacpp.shared_cache import MAX_CACHED_TOKENS, MIN_CACHED_PREFIXES
from localgen.cluster.autoscaling import ScalingPolicy
from localgen.cluster.prefix_table import table_chunks

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
    kv_tokens=20_000,
    kv_bytes=1000,
    cache="blocks",
)
SYSTEM, QUESTION, ANSWER = 640, 60, 3


def workload(num_requests: int, rate: float, seed: int = 1, **lengths: int) -> list[Request]:
    sizes = {"system": 300, "question": 40, "answer": 30} | lengths
    load = Workload(
        rate=rate,
        num_requests=num_requests,
        num_prompts=5,
        zipf=1.0,
        turns=3.0,
        think_s=2.0,
        swing=0.5,
        day_s=100.0,
        seed=seed,
        **sizes,
    )
    return list(conversations(load))


def routing(policy: str, **options: float) -> Routing:
    fetch_bytes_s = options.get("fetch_bytes_s", 1e9)
    gateways = int(options.get("gateways", 1))
    return Routing(
        policy=policy, spill=4, max_chunks=65_536, gateways=gateways, fetch_bytes_s=fetch_bytes_s
    )


def play(
    requests: list[Request],
    policy: str = PREFIX,
    costs: EngineCosts = COSTS,
    fleet: Fleet = Fleet(replicas=4),  # noqa: B008
) -> Outcome:
    return Cluster(fleet, costs, routing(policy)).play(requests)


def prompts_in_turn(num_prompts: int, rounds: int, apart_s: float) -> Iterator[Request]:
    """Each prompt once in a round, behind questions of their own."""
    for number in range(num_prompts * rounds):
        prompt = number % num_prompts
        chunks = tuple(bytes([prompt, at]) for at in range(SYSTEM // 64))
        segments = (Segment(prompt, SYSTEM), Segment(1000 + number, QUESTION))
        answer = Segment(100_000 + number, ANSWER)
        yield Request(number * apart_s, chunks, segments, answer, SYSTEM + QUESTION)


def test_a_queue_of_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    chance, now_s, requests, tokens = random.Random(5), 0.0, [], 1000
    costs = replace(COSTS, max_seqs=1, batch_tokens=tokens, attention_s=0.0)
    service_s = costs.step_s + tokens * costs.prompt_token_s
    for number in range(60_000):
        now_s += chance.expovariate(0.6 / service_s)
        segments = (Segment(2 * number, tokens),)
        requests.append(Request(now_s, (), segments, Segment(2 * number + 1, 1), tokens))
    outcome = play(requests, costs=costs, fleet=Fleet(replicas=1))
    wait_s = sum(outcome.ttft_s) / len(requests) - service_s
    assert wait_s == pytest.approx(0.6 * service_s / (2 * (1 - 0.6)), rel=0.04)
    assert outcome.e2e_s == outcome.ttft_s, "the first token is the last one"


def test_a_batch_takes_the_steps_that_its_costs_say() -> None:
    request = Request(0.0, (), (Segment(1, 700),), Segment(2, 11), 700)
    costs = replace(COSTS, first_token_s=0.03)
    outcome = play([request], costs=costs, fleet=Fleet(replicas=1))
    # 512 tokens, and the rest
    first_s = 2 * 0.01 + 700 * 1e-4 + 700 * 700 / 2 * 1e-8 + 0.03
    decode_s = 10 * (0.01 + 1e-4) + 1e-7 * sum(range(700, 710))
    assert list(outcome.ttft_s) == pytest.approx([first_s])
    assert list(outcome.e2e_s) == pytest.approx([first_s + decode_s])
    assert outcome.computed_tokens == 700


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_of_steps_take_as_long_as_single_steps(policy: str) -> None:
    fleet = Fleet(
        replicas=4, replicas_per_machine=2, slowdowns=(1.0, 2.0), start_s=1.0, mean_life_s=40.0
    )
    requests = workload(1500, rate=25.0)
    outcomes = [
        Cluster(fleet, COSTS, routing(policy, gateways=2), one_by_one=one_by_one).play(requests)
        for one_by_one in (True, False)
    ]
    single, runs = outcomes
    assert list(runs.ttft_s) == pytest.approx(list(single.ttft_s), rel=1e-9)
    assert list(runs.e2e_s) == pytest.approx(list(single.e2e_s), rel=1e-9)
    assert runs.num_events < single.num_events / 2
    assert (runs.failed, runs.deaths) == (single.failed, single.deaths)


def test_the_whole_steps_of_a_time_are_counted() -> None:
    chance = random.Random(2)
    for _ in range(500):
        costs = replace(
            COSTS,
            context_token_s=chance.choice([0.0, 1e-7, 1e-5]),
            batch_context_token_s=chance.choice([0.0, 1e-7, 1e-5]),
        )
        sequences, context = chance.randint(1, 64), chance.randint(0, 100_000)
        steps = chance.randint(0, 3000)
        took_s = costs.decode_s(steps, sequences, context)
        one_s = costs.decode_s(1, sequences, context)
        assert costs.steps_within(took_s + one_s * 0.01, sequences, context) == steps
        assert costs.steps_within(took_s - one_s * 0.01, sequences, context) == max(0, steps - 1)


def test_contexts_behind_the_first_cost_more() -> None:
    costs = replace(COSTS, context_token_s=1e-6, batch_context_token_s=3e-6)
    plain = replace(COSTS, context_token_s=1e-6)
    assert costs.decode_s(10, 1, 500) == plain.decode_s(10, 1, 500)
    more_s = costs.decode_s(1, 4, 2000) - plain.decode_s(1, 4, 2000)
    assert more_s == pytest.approx(3e-6 * 1500)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_ends_once_while_replicas_die(policy: str) -> None:
    requests = workload(3000, rate=60.0)
    fleet = Fleet(replicas=4, start_s=0.5, mean_life_s=8.0, seed=7)
    cluster = Cluster(fleet, COSTS, routing(policy))
    outcome = cluster.play(requests)
    assert outcome.num_requests == len(requests)
    assert len(outcome.ttft_s) == len(outcome.e2e_s) == len(requests) - outcome.failed
    assert outcome.deaths > 5
    assert outcome.failed > 0
    assert outcome.retries > 0
    assert outcome.answer_tokens < sum(request.answer.tokens for request in requests)
    assert not cluster._tickets


def test_all_is_answered_without_failures() -> None:
    requests = workload(1000, rate=30.0)
    outcome = play(requests)
    assert outcome.failed == outcome.refused == 0
    assert outcome.answer_tokens == sum(request.answer.tokens for request in requests)
    assert outcome.prompt_tokens == sum(request.prompt_tokens for request in requests)
    assert outcome.computed_tokens == outcome.prompt_tokens - outcome.cached_tokens
    assert min(outcome.ttft_s) > 0


def test_a_request_larger_than_the_cache_is_refused() -> None:
    large = Request(0.0, (), (Segment(1, COSTS.kv_tokens),), Segment(2, 1), COSTS.kv_tokens)
    outcome = play([large, *prompts_in_turn(1, 1, 0.0)])
    assert (outcome.refused, len(outcome.ttft_s)) == (1, 1)


def test_hit_rates_of_both_policies_are_those_computed_by_hand() -> None:
    # 5 prompts on 4 replicas, 8 rounds: in turn, a prompt comes to each replica twice
    requests = list(prompts_in_turn(5, 8, apart_s=1.0))
    share = SYSTEM / (SYSTEM + QUESTION)
    assert play(requests, ROUND_ROBIN).hit_rate == pytest.approx(share * 4 / 8)
    assert play(requests, PREFIX).hit_rate == pytest.approx(share * 7 / 8)


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    requests = [replace(each, arrival_s=0.0) for each in prompts_in_turn(1, 4, 0.0)]
    outcome = play(requests)
    assert outcome.computed_tokens == SYSTEM + 4 * QUESTION


def test_a_prefix_is_fetched_if_that_is_faster_than_to_compute_it() -> None:
    first, *others = prompts_in_turn(1, 40, 0.002)  # more at once than one replica gets
    requests = [first, *(replace(each, arrival_s=1.0 + each.arrival_s) for each in others)]
    fast, slow = (
        Cluster(Fleet(replicas=4), COSTS, routing(FETCH, fetch_bytes_s=speed)).play(requests)
        for speed in (1e9, 1e3)
    )
    plain = play(requests, PREFIX)
    assert fast.fetched_tokens == 3 * SYSTEM
    assert fast.computed_tokens == plain.computed_tokens - 3 * SYSTEM
    assert plain.computed_tokens == 4 * SYSTEM + 40 * QUESTION
    assert slow.fetched_tokens == 0
    assert slow.computed_tokens == plain.computed_tokens


def test_least_load_keeps_replicas_equally_busy() -> None:
    requests = [replace(each, arrival_s=0.0) for each in prompts_in_turn(16, 1, 0.0)]
    cluster = Cluster(Fleet(replicas=4), COSTS, routing(LEAST_LOAD))
    cluster.play(requests)
    assert {each.computed_tokens for each in cluster.replicas.values()} == {4 * (SYSTEM + QUESTION)}


def test_replicas_on_one_core_take_twice_as_long() -> None:
    requests = [replace(each, arrival_s=0.0) for each in prompts_in_turn(2, 1, 0.0)]

    def times_with(cores: int) -> list[float]:
        slowdowns = fair_shares(2, 4, cores)
        fleet = Fleet(replicas=2, replicas_per_machine=2, slowdowns=slowdowns)
        return list(play(requests, ROUND_ROBIN, fleet=fleet).e2e_s)

    assert times_with(4) == pytest.approx([2 * each for each in times_with(8)])


def test_the_least_recently_used_segments_leave_the_blocks() -> None:
    cache = BlockCache(110)
    old, new, newest = ((Segment(key, 30), Segment(key + 1, 10)) for key in (1, 3, 5))
    for segments in (old, new):
        assert cache.admit(segments)
        cache.release(segments)
    assert cache.cached_tokens(old) == 40
    assert cache.admit(newest)
    assert (cache.cached_tokens(old), cache.cached_tokens(new)) == (30, 40), "its end leaves first"
    assert not cache.admit((Segment(9, 71),)), "what runs is not evicted"
    assert cache.admit((Segment(9, 70),))
    assert (cache.cached_tokens(old), cache.cached_tokens(new)) == (0, 0)


def test_slots_keep_the_newest_sequences() -> None:
    cache = SlotCache(100_000)
    sequences = [(Segment(1, MAX_CACHED_TOKENS), Segment(key, 10)) for key in range(10, 20)]
    for segments in sequences:
        assert cache.admit(segments)
        cache.release(segments)
    kept = [each for each in sequences if cache.cached_tokens(each) > MAX_CACHED_TOKENS]
    assert kept == sequences[-MIN_CACHED_PREFIXES:]
    longer = (*sequences[-1], Segment(99, 5))
    assert cache.admit(longer)
    cache.release(longer)
    assert cache.cached_tokens(sequences[-4]) > MAX_CACHED_TOKENS, "the longer one takes a place"


def test_replicas_follow_the_load() -> None:
    requests = workload(4000, rate=40.0, answer=60)
    bounds = Bounds(least=1, most=6, up_s=1.0, down_s=5.0)
    cluster = Cluster(Fleet(replicas=1, start_s=2.0), COSTS, routing(PREFIX))
    Autoscaler(cluster, ScalingPolicy(4, 500), bounds)
    scaled = cluster.play(requests)
    few, many = (play(requests, fleet=Fleet(replicas=number)) for number in (1, 6))
    assert 2 <= scaled.max_replicas <= 6
    assert scaled.num_requests == len(requests)
    assert scaled.failed == scaled.refused == 0
    assert scaled.replica_s < many.replica_s
    assert few.attainment(0.5) < scaled.attainment(0.5) <= many.attainment(0.5)


def test_conversations_repeat_what_was_said() -> None:
    requests = workload(500, rate=10.0)
    assert requests == workload(500, rate=10.0)
    assert requests != workload(500, rate=10.0, seed=2)
    assert [each.arrival_s for each in requests] == sorted(each.arrival_s for each in requests)
    earlier: dict[Segment, Request] = {}
    continued = 0
    for request in requests:
        assert request.prompt_tokens == sum(tokens for _, tokens in request.prompt)
        assert len(request.chunks) == request.prompt_tokens // 64
        if before := earlier.get(request.prompt[-2]):
            assert request.prompt[:-1] == (*before.prompt, before.answer)
            assert request.chunks[: len(before.chunks)] == before.chunks
            continued += 1
        earlier[request.answer] = request
    assert continued > 200


def test_a_recorded_trace_shares_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1200, "output_length": 6, "hash_ids": [7, 8, 4]},
        {"timestamp": 9000, "input_length": 600, "output_length": 6, "hash_ids": [8]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = recorded(path)
    assert [each.arrival_s for each in (first, second, third)] == [0.0, 2.0, 8.0]
    assert first.prompt[:2] == second.prompt[:2]
    assert first.prompt[2] != second.prompt[2]
    assert third.prompt[0] not in first.prompt, "the same block behind another one"
    assert first.chunks[:16] == second.chunks[:16]
    assert not set(first.chunks[16:]) & set(second.chunks[16:])
    assert third.prompt_tokens == 600
    outcome = play([first, second, third])
    assert outcome.cached_tokens == 1024


def test_the_command_prints_the_same_figures_for_a_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def figures(name: str, *options: str) -> dict[str, float]:
        output = tmp_path / name
        command = ["--replicas", "3", "--requests", "50", "--output", str(output), *options]
        assert main(command) == 0
        series = json.loads(output.read_text())["series"]
        return {f"{each['test']} {each['side']}": each["median"] for each in series}

    one, again, other = figures("a"), figures("b"), figures("c", "--seed", "2")
    simulated = [name for name in one if "wall_s" not in name]
    assert len(simulated) > 40
    assert all(one[name] == again[name] for name in simulated)
    assert one["3 replicas: ttft_p95_s prefix"] != other["3 replicas: ttft_p95_s prefix"]
    assert "prefix-fetch" in capsys.readouterr().out


def test_the_command_has_reports_if_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert routing_of(parse([]), 10, PREFIX).report_s == 0
    assert routing_of(parse(["--report", "2"]), 10, PREFIX).report_s == 2
    with pytest.raises(SystemExit):
        parse(["--report", "nan"])
    assert "--report nan: give seconds, or 0" in capsys.readouterr().err


def test_the_simulated_table_grows_with_the_replicas_unless_it_is_told_its_size() -> None:
    assert routing_of(parse([]), 100, PREFIX).max_chunks == table_chunks(100) == 819_200
    scaled = parse(["--max-replicas", "30"])
    assert routing_of(scaled, 10, PREFIX).max_chunks == table_chunks(30)
    assert routing_of(parse(["--table", "4096"]), 100, PREFIX).max_chunks == 4096


def test_costs_are_complete_and_have_a_source(tmp_path: Path) -> None:
    names = [path.stem for path in FOLDER.glob("*.json")]
    assert names
    for name in names:
        assert len(load_costs(name).source) > 40
    with pytest.raises(ValueError, match=names[0]):
        load_costs("none")
    path = tmp_path / "costs.json"
    COSTS.save(path)
    assert load_costs(str(path)) == COSTS
    replace(COSTS, cache="pages").save(path)
    with pytest.raises(ValueError, match="cache is 'pages'"):
        load_costs(str(path))
