"""`python -m benchmarks.simulation.agreement`: a real cluster and its simulation, side by side.

Measures the costs of a replica, plays the same requests through the gateway of a real cluster and
through the simulator, and prints hit rates, times to the first token and the whole time of both.
Prefixes are kept in the KV cache only: the simulator has no tiers in RAM and on disk. Needs
localgen[cluster]: run it with the Python of .venv/cluster, on an idle machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.cluster import Cluster as RealCluster
from benchmarks.cluster import running_cluster
from benchmarks.measure import ModelLine, Report, command, table
from benchmarks.simulation.cluster import Cluster, Fleet
from benchmarks.simulation.costs import EngineCosts
from benchmarks.simulation.gateway import PREFIX, Routing
from benchmarks.simulation.measured_costs import (
    counted_words,
    measure_costs,
    measure_slowdowns,
    reload,
)
from benchmarks.simulation.request import Request, Segment
from localgen.backends.memory.system import num_physical_cores
from localgen.backends.types import Message
from localgen.bench.load import arrival_times
from localgen.bench.measured_request import MeasuredRequest
from localgen.bench.prompts import WordPrompts
from localgen.cluster.config import ClusterConfig
from localgen.cluster.prefix_table import MAX_CHUNKS, prompt_chunks

_NUM_SYSTEMS, _SYSTEM_TOKENS, _ANSWER_TOKENS = 8, 1500, 32
# more than a block of rows in llama.cpp, below which tokens cost more
_QUESTION_TOKENS = 80
_THREADS = 1  # of an engine: with more, the engines would wait for each other's threads
_HEAD = ("replicas", "figure", "real", "simulated", "difference")


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to be sent. system: number of its system prompt."""

    arrival_s: float
    system: int
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a play of all requests."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    took_s: float

    def rows(self, simulated: Figures, replicas: int) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for name in self.__slots__:
            mine, other = getattr(self, name), getattr(simulated, name)
            change = f"{other / mine - 1:+.1%}" if mine else "-"
            found.append((str(replicas), name, f"{mine:.3f}", f"{other:.3f}", change))
        return found


def plan(num_requests: int, rate: float, words: WordPrompts, seed: int) -> list[Planned]:
    """Questions behind one of the system prompts, at Poisson times."""
    chance = random.Random(seed)
    systems = [words.make(_SYSTEM_TOKENS) for _ in range(_NUM_SYSTEMS)]
    times = arrival_times(rate, is_poisson=True, seed=seed)
    planned = []
    for _, at_s in zip(range(num_requests), times, strict=False):
        number = chance.randrange(_NUM_SYSTEMS)
        question = words.make(_QUESTION_TOKENS)
        messages = (Message("system", systems[number]), Message("user", question))
        planned.append(Planned(at_s, number, messages))
    return planned


def play(cluster: RealCluster, planned: Sequence[Planned]) -> list[MeasuredRequest]:
    """Send each request at its time. Raises RuntimeError if one has no answer."""
    began_s = time.monotonic()

    def ask(each: Planned) -> MeasuredRequest:
        return cluster.gateway.ask(each.messages, _ANSWER_TOKENS)

    with ThreadPoolExecutor(len(planned)) as pool:
        running = []
        for each in planned:
            time.sleep(max(0.0, began_s + each.arrival_s - time.monotonic()))
            running.append(pool.submit(ask, each))
        answered = [each.result() for each in running]
    if errors := [each.error for each in answered if each.error]:
        raise RuntimeError(errors[0])
    return answered


def real_figures(answered: Sequence[MeasuredRequest]) -> Figures:
    times_s = [each.first_s - each.sent_s for each in answered]
    cached = sum(each.cached_tokens for each in answered)
    return Figures(
        cached / sum(each.prompt_tokens for each in answered),
        statistics.mean(times_s),
        statistics.median(times_s),
        float(np.percentile(times_s, 95)),
        max(each.ended_s for each in answered) - min(each.sent_s for each in answered),
    )


def simulated_requests(
    planned: Sequence[Planned], answered: Sequence[MeasuredRequest], model: str
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
        roles = [{"role": message.role, "content": message.content} for message in each.messages]
        requests.append(
            Request(
                each.arrival_s,
                prompt_chunks({"model": model, "messages": roles}),
                (
                    Segment(each.system, system_tokens),
                    Segment(1000 + 2 * number, answer.prompt_tokens - system_tokens),
                ),
                Segment(1001 + 2 * number, answer.completion_tokens),
                answer.prompt_tokens,
            )
        )
    return requests


def simulated_figures(
    requests: Sequence[Request],
    costs: EngineCosts,
    slowdowns: tuple[float, ...],
    names: tuple[str, ...],
) -> Figures:
    """slowdowns: of replicas that share this machine. names: of the real ones."""
    fleet = Fleet(
        replicas=len(names),
        replicas_per_machine=len(names),
        slowdowns=slowdowns,
        names=names,
    )
    routing = Routing(policy=PREFIX, spill=ClusterConfig().spill, max_chunks=MAX_CHUNKS)
    outcome = Cluster(fleet, costs, routing).play(requests)
    return Figures(
        outcome.hit_rate,
        statistics.mean(outcome.ttft_s),
        outcome.ttft_percentile_s(50),
        outcome.ttft_percentile_s(95),
        outcome.took_s - requests[0].arrival_s + costs.request_s,
    )


def rate_for(costs: EngineCosts, load: float) -> float:
    """Requests/s that take this share of the cores if half of the prompts is cached."""
    prompt_tokens = _SYSTEM_TOKENS + _QUESTION_TOKENS
    answer_s = costs.decode_s(_ANSWER_TOKENS, 1, prompt_tokens)
    work_s = costs.prompt_s(0, prompt_tokens) / 2 + answer_s
    return load * num_physical_cores() / (work_s * costs.threads)


def main(arguments: list[str] | None = None) -> int:
    """Play, simulate, and print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m benchmarks.simulation.agreement"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", default="2,4", help="with commas (default: 2,4)")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--load", type=float, default=0.4, help="of the cores (default: 0.4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-costs", type=Path, help="file for the measured costs")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    report = Report(ModelLine(options.model, 0, 0), 1, False, _THREADS, {})
    costs = None
    for replicas in map(int, options.replicas.split(",")):
        with running_cluster(replicas, options.model) as cluster:
            infos = [reload(each, options.model, _THREADS) for each in cluster.runtime_dirs]
            costs = costs or measure_costs(cluster, infos[0], _THREADS)
            slowdowns = measure_slowdowns(cluster)
            print(costs, slowdowns, file=sys.stderr, flush=True)
            words = counted_words(cluster, options.seed)
            for folder in cluster.runtime_dirs:
                reload(folder, options.model, _THREADS)
            rate = rate_for(costs, options.load)
            planned = plan(options.requests, rate, words, options.seed)
            answered = play(cluster, planned)
            names = tuple(httpx.get(f"{cluster.url}/v1/stats").json()["replicas"])
        real = real_figures(answered)
        requests = simulated_requests(planned, answered, options.model)
        simulated = simulated_figures(requests, costs, slowdowns, names)
        print(table(_HEAD, real.rows(simulated, replicas)), flush=True)
        for side, figures in (("real", real), ("simulated", simulated)):
            for name in figures.__slots__:
                report.add(f"{replicas} replicas: {name}", side, "", [getattr(figures, name)])
    if costs is not None and options.save_costs:
        costs.save(options.save_costs)
    report.commands.append(command("benchmarks.simulation.agreement", arguments))
    report.save("simulation-agreement", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
