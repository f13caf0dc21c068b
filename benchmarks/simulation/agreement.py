"""`python -m benchmarks.simulation.agreement`: a real cluster and its simulation, side by side.

Measures the costs of a replica, plays the same requests through the gateway of a real cluster,
twice, and through the simulator, and prints hit rates, times to the first token and the whole time
of each, and of all plays of a load together. The second play shows how much the first one could
differ by chance. Each real play is simulated 20 times, with arrivals up to 10 ms later. Prefixes
are kept in the KV cache only: the simulator has no tiers in RAM and on disk. Needs
localgen[cluster]: run it with the Python of .venv/cluster, on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from benchmarks.cluster import Cluster as RealCluster
from benchmarks.cluster import running_cluster
from benchmarks.measure import ModelLine, Report, command, table
from benchmarks.simulation.cluster import Cluster, Fleet
from benchmarks.simulation.comparison import HEAD, SUMMARY_HEAD, Comparison, Play, add_summary
from benchmarks.simulation.costs import EngineCosts
from benchmarks.simulation.gateway import PREFIX, Routing
from benchmarks.simulation.measured_costs import MeasuredCosts, counted_words
from benchmarks.simulation.measured_steps import (
    ANSWER_TOKENS,
    QUESTION_TOKENS,
    SYSTEM_TOKENS,
    MeasuredReplica,
)
from benchmarks.simulation.request import Request, Segment
from localgen.backends.llamacpp.shared_cache import MIN_CACHED_PREFIXES
from localgen.backends.memory.system import num_physical_cores
from localgen.backends.types import Message
from localgen.bench.load import arrival_times
from localgen.bench.measured_request import MeasuredRequest
from localgen.bench.prompts import WordPrompts
from localgen.cluster.config import ClusterConfig
from localgen.cluster.prefix_table import ROUTED_S, prompt_chunks, table_chunks

_NUM_SYSTEMS = 8
_THREADS = 1  # of an engine: with more, the engines would wait for each other's threads
_PLAYS, _SIMULATIONS = 2, 20
# as times on a real machine: which of two requests comes first decides what is cached later
_JITTER_S = 0.01
_REPORT_S = 2.0  # of localgen.cluster.deployment, which needs Ray
_MAX_OTHER_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to be sent. system: number of its system prompt."""

    arrival_s: float
    system: int
    messages: tuple[Message, ...]


def plan(num_requests: int, rate: float, words: WordPrompts, seed: int) -> list[Planned]:
    """Questions behind one of the system prompts, at Poisson times."""
    chance = random.Random(seed)
    systems = [words.make(SYSTEM_TOKENS) for _ in range(_NUM_SYSTEMS)]
    times = arrival_times(rate, is_poisson=True, seed=seed)
    planned = []
    for _, at_s in zip(range(num_requests), times, strict=False):
        number = chance.randrange(_NUM_SYSTEMS)
        question = words.make(QUESTION_TOKENS)
        messages = (Message("system", systems[number]), Message("user", question))
        planned.append(Planned(at_s, number, messages))
    return planned


def play(cluster: RealCluster, planned: Sequence[Planned]) -> list[MeasuredRequest]:
    """Send each request at its time. Raises RuntimeError if one has no answer."""
    began_s = time.monotonic()

    def ask(each: Planned) -> MeasuredRequest:
        return cluster.gateway.ask(each.messages, ANSWER_TOKENS)

    with ThreadPoolExecutor(len(planned)) as pool:
        running = []
        for each in planned:
            time.sleep(max(0.0, began_s + each.arrival_s - time.monotonic()))
            running.append(pool.submit(ask, each))
        answered = [each.result() for each in running]
    if errors := [each.error for each in answered if each.error]:
        raise RuntimeError(errors[0])
    return answered


def other_cores(cluster: RealCluster) -> Callable[[], float]:
    """Returns a function that gives the cores that strangers have used since this call."""
    began_s, before_s = time.monotonic(), _cpu_s_of_others(cluster)
    return lambda: (_cpu_s_of_others(cluster) - before_s) / (time.monotonic() - began_s)


def _cpu_s_of_others(cluster: RealCluster) -> float:
    """CPU time of this machine without the cluster, its parts that run now, and this process."""
    whole = psutil.cpu_times()
    used_s = float(whole.user + whole.nice + whole.system)
    for process in (*cluster.family(), psutil.Process()):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used_s -= times.user + times.system
    return used_s


def real_play(answered: Sequence[MeasuredRequest]) -> Play:
    return Play(
        [each.first_s - each.sent_s for each in answered],
        sum(each.prompt_tokens for each in answered),
        sum(each.cached_tokens for each in answered),
        max(each.ended_s for each in answered) - min(each.sent_s for each in answered),
    )


def simulated_requests(
    planned: Sequence[Planned], answered: Sequence[MeasuredRequest]
) -> list[Request]:
    """The same requests, with the tokens that the server counted."""
    shared = {
        number: max(
            each.cached_tokens
            for plan, each in zip(planned, answered, strict=True)
            if plan.system == number
        )
        for number in {each.system for each in planned}
    }
    # of a prompt that was never found in a cache: as long as the others
    usual = round(statistics.median(shared.values()))
    requests = []
    for number, (each, answer) in enumerate(zip(planned, answered, strict=True)):
        system_tokens = min(shared[each.system] or usual, answer.prompt_tokens - 1)
        # without its name, as the gateway hashes prompts for the model that all replicas have
        roles = [{"role": message.role, "content": message.content} for message in each.messages]
        requests.append(
            Request(
                each.arrival_s,
                prompt_chunks({"messages": roles}),
                (
                    Segment(each.system, system_tokens),
                    Segment(1000 + 2 * number, answer.prompt_tokens - system_tokens),
                ),
                Segment(1001 + 2 * number, answer.completion_tokens),
                answer.prompt_tokens,
            )
        )
    return requests


def simulated_play(
    requests: Sequence[Request],
    costs: EngineCosts,
    slowdowns: tuple[float, ...],
    names: tuple[str, ...],
) -> Play:
    """slowdowns: of replicas that share this machine. names: of the real ones."""
    fleet = Fleet(
        replicas=len(names),
        replicas_per_machine=len(names),
        slowdowns=slowdowns,
        names=names,
    )
    spill = ClusterConfig().spill
    routing = Routing(
        policy=PREFIX, spill=spill, max_chunks=table_chunks(len(names)), report_s=_REPORT_S
    )
    outcome = Cluster(fleet, costs, routing).play(requests)
    assert not outcome.failed + outcome.refused, "each request is answered"
    took_s = outcome.took_s - requests[0].arrival_s + costs.request_s
    return Play(list(outcome.ttft_s), outcome.prompt_tokens, outcome.cached_tokens, took_s)


def at_other_times(requests: Sequence[Request], seed: int) -> list[Request]:
    """The requests, each up to _JITTER_S later."""
    chance = random.Random(seed)
    moved = [
        replace(each, arrival_s=each.arrival_s + chance.uniform(0, _JITTER_S)) for each in requests
    ]
    return sorted(moved, key=lambda each: each.arrival_s)


def rate_for(costs: EngineCosts, load: float) -> float:
    """Requests/s that take this share of the cores if half of the prompts is cached."""
    prompt_tokens = SYSTEM_TOKENS + QUESTION_TOKENS
    cells = MIN_CACHED_PREFIXES * prompt_tokens
    answer_s = costs.decode_s(ANSWER_TOKENS, 1, prompt_tokens, cells)
    work_s = costs.prompt_s(0, prompt_tokens, cells) / 2 + answer_s
    return load * num_physical_cores() / (work_s * costs.threads)


@dataclass(frozen=True, slots=True)
class _Played:
    """Real plays of the same requests, which take this share of the cores.

    costs: of each play, from the rounds of measurements before and after it.
    """

    load: float
    seed: int
    planned: list[Planned]
    plays: list[list[MeasuredRequest]]
    costs: list[EngineCosts]


def compare(cluster: RealCluster, options: argparse.Namespace, report: Report) -> list[Comparison]:
    """Measure the costs, and play each load with each seed."""
    replicas = [MeasuredReplica(each, options.model, _THREADS) for each in cluster.runtime_dirs]
    measured = MeasuredCosts(cluster, replicas[0].info.path, _THREADS, _REPORT_S)
    played = _play_all(cluster, replicas, measured, options, report)
    costs, slowdowns = measured.costs(), measured.slowdowns
    print(f"{costs}, error {measured.error:.1%}, {slowdowns}", file=sys.stderr, flush=True)
    report.add(f"{len(replicas)} replicas: error of the fit", "costs", "of 1", [measured.error])
    for busy, samples in enumerate(measured.slowdowns_of_rounds[1:], 2):
        report.add(f"{len(replicas)} replicas: slowdown of {busy} busy ones", "costs", "", samples)
    if options.save_costs:
        costs.save(options.save_costs)
    names = tuple(httpx.get(f"{cluster.url}/v1/stats").json()["replicas"])
    found = []
    for each in played:
        requests = simulated_requests(each.planned, each.plays[0])
        simulated = [
            simulated_play(at_other_times(requests, number), its_costs, slowdowns, names)
            for its_costs in each.costs
            for number in range(_SIMULATIONS)
        ]
        real = list(map(real_play, each.plays))
        found.append(Comparison(len(replicas), each.load, each.seed, real, simulated))
        found[-1].add_to(report)
        print(table(HEAD, found[-1].rows()), flush=True)
    return found


def _play_all(
    cluster: RealCluster,
    replicas: Sequence[MeasuredReplica],
    measured: MeasuredCosts,
    options: argparse.Namespace,
    report: Report,
) -> list[_Played]:
    """Play each load with each seed, and measure costs before, between and after the plays."""
    measured.measure()
    rates = {load: rate_for(measured.costs(), load) for load in options.load}
    found = []
    for load, seed in itertools.product(options.load, options.seed):
        words = counted_words(cluster, seed)
        each = _Played(load, seed, plan(options.requests, rates[load], words, seed), [], [])
        for _ in range(_PLAYS):
            each.plays.append(_play_in_empty(cluster, replicas, each.planned, report))
            measured.measure()
            each.costs.append(measured.costs(first=measured.num_rounds - 2))
        found.append(each)
    return found


def _play_in_empty(
    cluster: RealCluster,
    replicas: Sequence[MeasuredReplica],
    planned: Sequence[Planned],
    report: Report,
) -> list[MeasuredRequest]:
    time.sleep(ROUTED_S)  # until then the gateway believes no report that something is lost
    for each in replicas:
        each.empty()
    time.sleep(2 * _REPORT_S)
    used = other_cores(cluster)
    answered = play(cluster, planned)
    cores = used()
    report.add("cores that other processes used", "real", "cores", [cores])
    if cores > _MAX_OTHER_CORES:
        print(f"other processes used {cores:.2f} cores: the machine is not idle", file=sys.stderr)
    return answered


def _integers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    """Play, simulate, and print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m benchmarks.simulation.agreement"
    )
    add = parser.add_argument
    add("--model", default="tiny")
    add("--replicas", type=_integers, default=[2, 4], help="with commas (default: 2,4)")
    add("--requests", type=int, default=100, help="of a play (default: 100)")
    add("--load", type=_shares, default=[0.4], help="of the cores, with commas (default: 0.4)")
    add("--seed", type=_integers, default=[0], help="with commas (default: 0)")
    add("--save-costs", type=Path, help="file for the measured costs")
    add("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    report = Report(ModelLine(options.model, 0, 0), _PLAYS, False, _THREADS, {})
    report.commands.append(command("benchmarks.simulation.agreement", arguments))
    for replicas in options.replicas:
        with running_cluster(replicas, options.model) as cluster:
            found = compare(cluster, options, report)
        print(table(SUMMARY_HEAD, add_summary(found, report)), flush=True)
        report.save("simulation-agreement", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
