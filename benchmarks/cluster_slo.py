"""Autoscaling: the share of first tokens in time, and replica-seconds, beside fixed numbers.

A load that rises and falls in steps is played to three clusters, one after the other: one replica,
so many as may be, and a number that changes. Each replica computes with one thread. Needs
localgen[cluster]: run it with the Python of .venv/cluster.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import Cluster, running_cluster, ttft_ms
from benchmarks.measure import ModelLine, Report, command
from localgen.backends.types import Message

_MODEL, _PROMPT_WORDS, _ANSWER_TOKENS = "tiny", 300, 16
_MAX_RUNNING = 256
_COUNT_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """ttft_ms: of the requests that were answered. failed: requests.

    replica_s: replica-seconds, with the time in which a replica starts or ends.
    """

    ttft_ms: tuple[float, ...]
    failed: int
    replica_s: float

    def attainment(self, slo_ms: float) -> float:
        """Share of all requests with a first token in time."""
        in_time = sum(each <= slo_ms for each in self.ttft_ms)
        return in_time / (len(self.ttft_ms) + self.failed)


def arrivals(rates: Sequence[float], step_s: float, seed: int) -> list[float]:
    """Times of a Poisson process whose rate changes in steps."""
    generator, times = random.Random(seed), list[float]()
    for number, rate in enumerate(rates):
        at_s = number * step_s
        while (at_s := at_s + generator.expovariate(rate)) < (number + 1) * step_s:
            times.append(at_s)
    return times


def play(cluster: Cluster, times: Sequence[float]) -> Outcome:
    """Send a request with a prompt of its own at each of the times."""
    began_s = time.monotonic()
    ended = threading.Event()

    def ask(number: int, at_s: float) -> float | None:
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        system = f"prompt {number} " * (_PROMPT_WORDS // 2)
        messages = [Message("system", system), Message("user", "Hello")]
        request = cluster.gateway.ask(messages, _ANSWER_TOKENS)
        return None if request.error else ttft_ms(request)

    with ThreadPoolExecutor(_MAX_RUNNING + 1) as pool:
        counted = pool.submit(_replica_seconds, cluster, ended)
        found = list(pool.map(ask, range(len(times)), times))
        ended.set()
    answered = tuple(each for each in found if each is not None)
    return Outcome(answered, len(found) - len(answered), counted.result())


def _replica_seconds(cluster: Cluster, ended: threading.Event) -> float:
    total, last_s = 0.0, time.monotonic()
    while not ended.wait(_COUNT_PERIOD_S):
        count = cluster.num_replicas()
        now_s = time.monotonic()
        total += count * (now_s - last_s)
        last_s = now_s
    return total


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints a line for each cluster."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.cluster_slo")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1, 3, 5, 3, 1], help="per second"
    )
    parser.add_argument("--step", type=float, default=25.0, help="seconds of each rate")
    parser.add_argument("--slo", type=int, default=1000, help="of the first token, in ms")
    parser.add_argument("--max-replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    times = arrivals(options.rates, options.step, options.seed)
    report = Report(ModelLine(_MODEL, 0, 0), 1, False, 1, {})
    scaling = (
        f"max_replicas = {options.max_replicas}\nttft_slo_ms = {options.slo}\n"
        "downscale_delay_s = 5\n"
    )
    sides = {
        "1 replica": (1, ""),
        f"{options.max_replicas} replicas": (options.max_replicas, ""),
        f"1 to {options.max_replicas} replicas": (1, scaling),
    }
    for side, (replicas, settings) in sides.items():
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(settings)
            file.flush()
            threads = ("-t", "1", "-f", file.name)
            with running_cluster(replicas, _MODEL, *threads) as cluster:
                outcome = play(cluster, times)
        share = outcome.attainment(options.slo)
        print(
            f"{side}: {share:.1%} of {len(times)} first tokens within {options.slo} ms, median "
            f"{statistics.median(outcome.ttft_ms):.0f} ms, {outcome.failed} failed, "
            f"{outcome.replica_s:.0f} replica-seconds",
            flush=True,
        )
        report.add(f"first tokens within {options.slo} ms", side, "of 1", [share])
        report.add("TTFT", side, "ms", outcome.ttft_ms)
        report.add("requests that failed", side, "", [outcome.failed])
        report.add("replica-seconds", side, "s", [outcome.replica_s])
    report.commands.append(command("benchmarks.cluster_slo", arguments))
    report.save("cluster-slo", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
