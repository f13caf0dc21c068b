"""Prompt replicas: gaps between the tokens of running streams while long prompts arrive.

Two clusters with the same number of engines in turn: in one all of them answer, in the other one
of them only computes prompts. Each engine computes with one thread and without drafts, so that a
piece of a stream is a token. Needs localgen[cluster]: run it with the Python of .venv/cluster.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cluster import Cluster, ask, running_cluster, ttft_ms
from benchmarks.measure import ModelLine, Report, command
from localgen.bench.estimates import percentile

_NUM_STREAMS, _STREAM_TOKENS = 2, 400
_ANSWER_TOKENS = 2
_LOAD = '[load]\nthreads = 1\ndraft = "none"\n'


@dataclass(frozen=True, slots=True)
class Load:
    """Long prompts, one each period_s seconds. words: of a prompt."""

    prompts: int
    words: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """gaps_ms: between tokens of the streams. ttft_ms: of the long prompts."""

    gaps_ms: tuple[float, ...]
    ttft_ms: tuple[float, ...]


def play(cluster: Cluster, load: Load, tag: str) -> Outcome:
    """Send long prompts while streams run. tag: which no other load of this cluster has.

    Raises RuntimeError if a request has no answer.
    """
    ended = threading.Event()

    def stream(number: int) -> list[float]:
        gaps = list[float]()
        for turn in itertools.count():
            request = ask(cluster.gateway, f"{tag} {number}.", f"Part {turn}", _STREAM_TOKENS)
            gaps += [gap_s * 1e3 for gap_s in request.gaps_s]
            if ended.is_set():
                break
        return gaps

    def prompt(number: int) -> float:
        time.sleep(number * load.period_s)
        system = f"{tag}{number} prompt " * (load.words // 2)
        return ttft_ms(ask(cluster.gateway, system, "Hello", _ANSWER_TOKENS))

    with ThreadPoolExecutor(_NUM_STREAMS + load.prompts) as pool:
        streams = [pool.submit(stream, number) for number in range(_NUM_STREAMS)]
        try:
            times = list(pool.map(prompt, range(load.prompts)))
        finally:
            ended.set()
        gaps = [gap for each in streams for gap in each.result()]
    return Outcome(tuple(gaps), tuple(times))


def measure(model: str, engines: int, prompt_replicas: int, load: Load) -> Outcome:
    """Start a cluster, and play a load to it."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(f"prompt_replicas = {prompt_replicas}\n{_LOAD}")
        file.flush()
        with running_cluster(engines - prompt_replicas, model, "-f", file.name) as cluster:
            play(cluster, replace(load, prompts=2), "warm")  # first requests are slower
            return play(cluster, load, "long")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints a line for each cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m benchmarks.cluster_prompts"
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--engines", type=int, default=2, help="in each cluster")
    parser.add_argument("--prompts", type=int, default=15, help="long ones, in each round")
    parser.add_argument("--words", type=int, default=800, help="of a prompt")
    parser.add_argument("--period", type=float, default=1.5, help="seconds between prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    report = Report(ModelLine(options.model, 0, 0), options.rounds, False, 1, {})
    load = Load(options.prompts, options.words, options.period)
    sides = {f"{options.engines} engines that answer": 0, "one of them computes prompts": 1}
    found: dict[str, list[Outcome]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, prompt_replicas in sides.items():
            outcome = measure(options.model, options.engines, prompt_replicas, load)
            found[side].append(outcome)
            p50, p99 = (percentile(outcome.gaps_ms, share) for share in (0.5, 0.99))
            print(
                f"{side}: gaps p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most "
                f"{max(outcome.gaps_ms):.0f} ms; first token of a long prompt, median "
                f"{percentile(outcome.ttft_ms, 0.5):.0f} ms",
                flush=True,
            )
    for side, outcomes in found.items():
        for name, share in (("p50", 0.5), ("p99", 0.99), ("at most", 1.0)):
            gaps = [percentile(each.gaps_ms, share) for each in outcomes]
            report.add(f"gaps between tokens, {name}", side, "ms", gaps)
        times = [percentile(each.ttft_ms, 0.5) for each in outcomes]
        report.add("first token of a long prompt, median", side, "ms", times)
    report.commands.append(command("benchmarks.cluster_prompts", arguments))
    report.save("cluster-prompts", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
